"""What a reward is: a function from a prompt and an answer to named, unweighted parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The judgement of one answer."""

    reward: float
    success: bool
    """Whether the answer is right, whatever else the reward counts."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted, so that a change of weights does not change what is logged."""


Reward = Callable[[Prompt, str], Score]
