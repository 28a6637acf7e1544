"""Ranks: the one place that knows how many processes train together.

Everything else is written for one rank, and calls the world where numbers of all ranks meet: the
denominators of an optimizer step, the means of metrics, the groups of a training step, and what
one rank alone writes to the run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from covey.objective.diagnostics import Meter, summary
from covey.types import Group, Totals


class World(Protocol):
    """The processes that train one policy together."""

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def is_main(self) -> bool:
        """Whether this one writes the run folder and the trackers."""

    def sum(self, totals: Totals) -> Totals:
        """Add up the denominators of one optimizer step."""

    def mean(self, meter: Meter) -> dict[str, float]:
        """Return the metrics of all observations, whichever rank made them."""

    def gather(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups that all ranks have collected, the same on each of them."""

    def barrier(self) -> None:
        """Wait for the other ranks."""


@dataclass(frozen=True, slots=True)
class OneRank:
    """A world of one process: all numbers are already those of all ranks."""

    rank: int = 0
    size: int = 1
    is_main: bool = True

    def sum(self, totals: Totals) -> Totals:
        """Return the totals."""
        return totals

    def mean(self, meter: Meter) -> dict[str, float]:
        """Return the metrics of the meter."""
        return summary(meter)

    def gather(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups."""
        return tuple(groups)

    def barrier(self) -> None:
        """Return at once."""
