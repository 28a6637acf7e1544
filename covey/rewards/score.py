"""What a reward is: it judges one answer to one prompt, and says why in named parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The judgement of one answer."""

    reward: float
    success: bool
    """Whether the answer is right, whatever else the reward counts; of a form: whether it holds."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted, so that a change of weights does not change what is logged."""
    attempted: bool = True
    """Whether the completion gives an answer at all, right or wrong, that can be compared."""


class Reward(Protocol):
    """A judge. A frozen dataclass whose fields are its options, so it can go to other processes.

    It may raise: then the answer has no reward, which is not the same as a reward of 0.
    """

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that it gives."""

    @property
    def quick(self) -> bool:
        """Whether it takes at most milliseconds, whatever the text: it needs no time limit."""

    @property
    def version(self) -> int:
        """Goes up when the meaning of its numbers changes."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""


def longest(reward: Reward) -> float:
    """Return the seconds that a reward may take by limits of its own; 0 where it has none."""
    return float(getattr(reward, "longest", 0.0))
