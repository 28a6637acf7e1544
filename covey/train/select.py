"""Which groups an update learns from. Filters are not losses: they combine with any objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The groups to learn from, and how many were left out."""

    groups: tuple[Group, ...]
    dropped: int


def select(groups: Sequence[Group]) -> Selected:
    """Leave out groups with fewer than two scored answers: there is nothing to compare."""
    kept = tuple(g for g in groups if sum(r.reward is not None for r in g.rollouts) >= 2)
    return Selected(groups=kept, dropped=len(groups) - len(kept))
