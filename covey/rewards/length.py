"""Punishment of answers that are too long, added to their rewards. It sees a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from covey.errors import ConfigError
from covey.types import Rollout

ROUNDING = 1e-9
"""A share of a group, such as 0.8 * 5 answers, is exact to this."""

LengthPenalty = Callable[[Sequence[Rollout]], list[float]]
"""From the answers of a group to what is added to each one's reward: 0 or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPenalty:
    """Nothing."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return a 0 for each."""
        return [0.0] * len(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soft:
    """Soft overlong punishment, DAPO (arXiv 2503.14476) equation 13.

    0 up to limit - cache tokens, then down in a straight line to -1 at the limit.
    """

    limit: int
    """The longest answer; in a run, rollout.max_tokens unless given."""
    cache: int
    """Over how many tokens before the limit it grows; in a run, a fifth of it unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.limit:
            raise ConfigError(
                f"length_penalty: cache = {self.cache} must lie between 1 and limit = {self.limit}"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the punishment of each."""
        return [self.of(len(rollout.tokens)) for rollout in rollouts]

    def of(self, length: int) -> float:
        """Return the punishment of an answer of so many tokens, its end token included."""
        return -min(max(length - (self.limit - self.cache), 0), self.cache) / self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """Group-relative overlong punishment, arXiv 2508.04349 appendix C.

    Answers are measured against L, the larger of mean length and mid-range: nothing below L, down
    in a straight line to -size at 2 L. In an easy group (a share of `easy` or more is right) L is
    that of the right answers, and they are punished; in a hard one (1 - easy or less) nobody is; in
    between L is that of all, and the larger side is punished, the wrong one if they are equal.

    The paper leaves `easy` open.
    """

    easy: float = 0.75
    size: float = 0.5

    def __post_init__(self) -> None:
        if not 0.5 <= self.easy <= 1.0 or self.size < 0:
            raise ConfigError(
                f"length_penalty: easy = {self.easy} must lie between 0.5 and 1, and size = "
                f"{self.size} must not be negative"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the punishment of each; answers that could not be scored count for nothing."""
        scored = [r for r in rollouts if r.success is not None]
        right = [r for r in scored if r.success]
        wrong, bound = len(scored) - len(right), self.easy * len(scored) - ROUNDING
        if not right or wrong >= bound:
            return [0.0] * len(rollouts)
        easy = len(right) >= bound
        lengths = [len(r.tokens) for r in (right if easy else scored)]
        measure = max((min(lengths) + max(lengths)) / 2, sum(lengths) / len(lengths))
        punished = easy or 2 * len(right) > len(scored)
        return [
            self._of(len(r.tokens), measure) if r.success is punished else 0.0 for r in rollouts
        ]

    def _of(self, length: int, measure: float) -> float:
        return -self.size * min(max((length - measure) / measure, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An answer that was cut off is worth `at_most`, whatever its reward: open-instruct's penalty.

    There it is called non_stop_penalty, and the value replaces the reward; here it never raises
    one.
    """

    at_most: float = 0.0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return what each loses; answers that could not be scored lose nothing."""
        return [
            min(self.at_most - r.reward, 0.0)
            if r.finish == "length" and r.reward is not None
            else 0.0
            for r in rollouts
        ]


LENGTH_PENALTIES: Mapping[str, Callable[..., LengthPenalty]] = MappingProxyType(
    {
        "none": NoPenalty,
        "soft": Soft,
        "group_relative": GroupRelative,
        "unfinished": Unfinished,
    }
)
