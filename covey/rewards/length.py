"""Length penalties, which are added to the rewards of the rollouts in a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from covey.errors import ConfigError
from covey.types import Rollout

ROUNDING = 1e-9
"""Allowed rounding error in the product of a fraction and a group size, such as 0.8 * 5."""

LengthPenalty = Callable[[Sequence[Rollout]], list[float]]
"""A function that returns a penalty for each rollout of a group. A penalty is 0 or negative, and is
added to the rollout's reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPenalty:
    """No length penalty."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [0.0] * len(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soft:
    """Soft overlong punishment, DAPO (arXiv 2503.14476) equation 13.

    The penalty is 0 for at most `limit - cache` tokens, and falls linearly to -1 at `limit` tokens.
    """

    limit: int
    """Maximum length of a completion, in tokens. The default is `rollout.max_tokens`."""
    cache: int
    """Number of tokens between the start of the penalty and `limit`. The default is `limit / 5`."""

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.limit:
            raise ConfigError(
                f"length_penalty: cache = {self.cache} must be between 1 and limit = {self.limit}"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self.of(len(rollout.tokens)) for rollout in rollouts]

    def of(self, length: int) -> float:
        """Return the penalty of a completion of `length` tokens, including its end token."""
        return -min(max(length - (self.limit - self.cache), 0), self.cache) / self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """Group-relative overlong punishment, arXiv 2508.04349 appendix C.

    Let L be the larger of two lengths: the mean completion length, and the midpoint between the
    shortest and the longest completion. A completion of at most L tokens gets no penalty. From L to
    2 L tokens, the penalty falls linearly from 0 to -`size`.

    - In an easy group (accuracy of at least `easy`), L is computed from the correct rollouts, and
      only correct rollouts are penalised.
    - In a hard group (accuracy of at most 1 - easy), no rollout is penalised.
    - In a group of medium difficulty, L is computed from all rollouts. If more than half of the
      rollouts are correct, the correct rollouts are penalised. If at most half of the rollouts are
      correct, the incorrect rollouts are penalised.

    The default of `easy` is Covey's choice, because the paper gives no value.
    """

    easy: float = 0.75
    size: float = 0.5

    def __post_init__(self) -> None:
        if not 0.5 <= self.easy <= 1.0 or self.size < 0:
            raise ConfigError(
                f"length_penalty: easy = {self.easy} must be between 0.5 and 1, and size = "
                f"{self.size} must not be negative"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the penalty of each rollout. Unscored rollouts are ignored and get no penalty."""
        scored = [r for r in rollouts if r.success is not None]
        correct = [r for r in scored if r.success]
        incorrect, bound = len(scored) - len(correct), self.easy * len(scored) - ROUNDING
        if not correct or incorrect >= bound:
            return [0.0] * len(rollouts)
        easy = len(correct) >= bound
        lengths = [len(r.tokens) for r in (correct if easy else scored)]
        measure = max((min(lengths) + max(lengths)) / 2, sum(lengths) / len(lengths))
        penalised = easy or 2 * len(correct) > len(scored)
        return [
            -self.size * min(max((len(r.tokens) - measure) / measure, 0.0), 1.0)
            if r.success is penalised
            else 0.0
            for r in rollouts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Upper limit for the reward of truncated completions, like open-instruct's non_stop_penalty.

    A reward above `at_most` is lowered to `at_most`. In open-instruct, a fixed value replaces the
    reward of a truncated completion, even if the reward is lower than the fixed value.
    """

    at_most: float = 0.0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the penalty of each rollout, which is 0 for an unscored rollout."""
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
