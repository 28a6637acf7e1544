"""The reward protocol: a reward function scores one completion and reports named reward parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from covey.errors import ConfigError
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion."""

    reward: float
    success: bool
    """Whether the final answer is correct or, for a format reward, whether the format is
    correct."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward parts before weighting, so that logged values do not depend on the weights."""
    attempted: bool = True
    """Whether the completion has a final answer, correct or wrong, that can be scored."""
    neutral: bool = False
    """Whether the prompt has no target, so that the completion is neither correct nor wrong."""
    feedback: str = field(default="", compare=False)
    """A description of the completion's errors, for the prompt of a self-teacher (docs/sdpo.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Information for a reward function in addition to the prompt and the text."""

    completion_ids: tuple[tuple[int, ...], ...] = ()
    """The tokens of each completion."""
    global_step: int | None = None
    """Number of optimizer steps scheduled before the current training step. In evaluations,
    `global_step` is None, and TRL-style reward functions get the value of `max_steps` as their
    `global_step`."""
    max_steps: int = 0
    """Number of optimizer steps of the run, or 0 if the reward is called outside a run."""


NO_CALL = Call()


class SkippedError(Exception):
    """Raised by a reward function that intentionally gives a completion no reward.

    A skipped completion does not count as a scoring error.
    """


class Reward(Protocol):
    """A reward function: a frozen dataclass whose fields are its options.

    A reward must be picklable, because each scoring process receives a copy of the reward. If a
    reward function raises an error, the completion has no reward, which is not the same as a reward
    of 0. Subclasses inherit the default methods of this class.
    """

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward that this reward function can return."""
        return 0.0, 1.0

    @property
    def quick(self) -> bool:
        """Whether every text is scored within milliseconds, so that scoring needs no time limit."""
        return True

    @property
    def version(self) -> int:
        """Version of the reward, increased when the meaning of its scores changes."""
        return 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""


def max_seconds(reward: Reward) -> float:
    return float(getattr(reward, "max_seconds", 0.0))


def at_progress(reward: Reward, progress: float) -> Reward:
    """Return the reward with the weights that apply after the given fraction of the run."""
    at = getattr(reward, "at", None)
    return reward if at is None else at(progress)


def check_option(holds: bool, message: str) -> None:
    """Raise ConfigError with the given message if a condition on a reward's options is false."""
    if not holds:
        raise ConfigError(f"reward: {message}")


# The base class of rewards that need a target, with a score for prompts that have no target.

WithoutTarget = float | Literal["error", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReward(Reward):
    """The base class of rewards that compare a completion with a target."""

    without_target: WithoutTarget = "error"
    """How to score a completion whose prompt has no target. `error` raises an error, `none` gives
    the completion no score, and a number from 0 to 1 is the score."""

    def __post_init__(self) -> None:
        value = self.without_target
        check_option(
            value in ("error", "none") or (not isinstance(value, str) and 0 <= value <= 1),
            f"without_target = {value!r} must be 'error', 'none' or a number from 0 to 1",
        )

    def neutral(self, error: str, parts: Sequence[str]) -> Score:
        """Return the score of a completion whose prompt has no target.

        A completion whose prompt has no target is never a success. Raises ValueError if
        `without_target` is `error`, and SkippedError if `without_target` is `none`.
        """
        value = self.without_target
        if value == "error":
            raise ValueError(error)
        if isinstance(value, str):
            raise SkippedError(error)
        neutral = dict.fromkeys(parts, float(value))
        return Score(reward=value, success=False, parts=neutral, neutral=True)
