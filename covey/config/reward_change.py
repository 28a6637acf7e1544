"""The [reward_change] section: why the reward differs from that of the previous run."""

from __future__ import annotations

from covey.config.section import Section


class RewardChange(Section):
    """[reward_change]. It changes nothing in a run; the log of reward changes records it."""

    reason: str = ""
    """Why the reward was changed since the previous run of the same task."""
    expected_effect: str = ""
    """What the change should do, such as "fewer completions without an answer"."""
