"""The [reward_change] section: why the reward differs from the reward of the previous run."""

from __future__ import annotations

from covey.config.section import Section


class RewardChange(Section):
    """[reward_change]: notes for the log of reward changes, without effect on training."""

    reason: str = ""
    """Why the reward was changed since the previous run of the same task."""
    expected_effect: str = ""
    """What the change should do, such as "fewer completions without an answer"."""
