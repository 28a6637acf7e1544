"""A reward that is scored in workers, because it says that it is slow."""

from __future__ import annotations

from dataclasses import dataclass

from covey.rewards.think_answer import ThinkAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(ThinkAnswer):
    """The reward of the arithmetic recipe."""

    @property
    def quick(self) -> bool:
        return False
