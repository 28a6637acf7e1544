"""The base class of rewards that need a target, with a score for prompts that have no target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from covey.rewards.score import Reward, Score, SkippedError, check_option

WithoutTarget = float | Literal["error", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReward(Reward):
    """The base class of rewards that compare a completion with a target."""

    without_target: WithoutTarget = "error"
    """For a prompt without a target, the reward raises an error (`error`), gives no score (`none`),
    or gives a neutral score from 0 to 1, such as 0.5."""

    def __post_init__(self) -> None:
        value = self.without_target
        check_option(
            value in ("error", "none") or (not isinstance(value, str) and 0 <= value <= 1),
            f"without_target = {value!r} must be 'error', 'none' or a number from 0 to 1",
        )

    def neutral(self, error: str, parts: Sequence[str]) -> Score:
        """Return the score of a completion whose prompt has no target.

        Raises ValueError if `without_target` is `error`, and SkippedError if it is `none`. A
        completion whose prompt has no target is never a success.
        """
        value = self.without_target
        if value == "error":
            raise ValueError(error)
        if isinstance(value, str):
            raise SkippedError(error)
        return Score(reward=value, success=False, parts=dict.fromkeys(parts, float(value)))
