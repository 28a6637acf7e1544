"""Algorithms that are the same on a batch, or but for a factor.

What an algorithm does to a policy is a vector: the slope of its loss in each token's
log-probability. Two with equal slopes are one algorithm here, whatever their formulas say; two with
proportional slopes differ by a learning rate, which Adam and the clip of the norm all but undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ROUNDING = 1e-5
"""How far slopes, relative to the largest, may be from proportional: float32 sums are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An algorithm of a family."""

    name: str
    factor: float
    """How many times the leader's slopes it has."""
    identical: bool
    """Whether they are the leader's to the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Algorithms with proportional slopes, the leader first."""

    members: tuple[Member, ...]

    @property
    def leader(self) -> str:
        """The first of them."""
        return self.members[0].name


def multiple(slopes: torch.Tensor, of: torch.Tensor) -> float | None:
    """Return c if slopes = c * of up to rounding, c > 0; None: they are no multiple.

    All zeros are a multiple of all zeros only, by 1.
    """
    largest = float(slopes.abs().max()) if slopes.numel() else 0.0
    square = float(of @ of)
    if largest == 0.0 or square == 0.0:
        return 1.0 if largest == 0.0 and square == 0.0 else None
    factor = float(slopes @ of) / square
    near = bool((slopes - factor * of).abs().max() <= ROUNDING * largest)
    return factor if near and factor > 0.0 else None


def families(slopes: Mapping[str, torch.Tensor]) -> tuple[Family, ...]:
    """Put algorithms together whose slopes, each one row in float64, are proportional."""
    found: list[list[Member]] = []
    for name, row in slopes.items():
        for members in found:
            leader = slopes[members[0].name]
            identical = torch.equal(row, leader)
            factor = 1.0 if identical else multiple(row, leader)
            if factor is not None:
                members.append(Member(name=name, factor=factor, identical=identical))
                break
        else:
            found.append([Member(name=name, factor=1.0, identical=True)])
    return tuple(Family(members=tuple(members)) for members in found)
