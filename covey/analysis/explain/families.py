"""Families of algorithms with proportional gradients, and the length bias of algorithms.

An algorithm changes a policy only through its token gradients: d loss / d logp of each token.
Algorithms with equal token gradients give the same update on a batch. Algorithms with proportional
token gradients differ only by a factor, like two learning rates. Adam and gradient clipping mostly
remove a constant factor of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from covey.types import Batch

ROUNDING = 1e-5
"""Largest relative deviation from proportional token gradients that counts as float32 rounding."""
BINS = 4
"""The number of length bins; all bins have about the same number of completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An algorithm of a family."""

    name: str
    factor: float
    """The token gradients are `factor` times the token gradients of the first algorithm."""
    identical: bool
    """Whether the token gradients are bit-identical to the first algorithm's token gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Algorithms with proportional token gradients; the first algorithm is called the leader."""

    members: tuple[Member, ...]

    @property
    def leader(self) -> str:
        """The first algorithm."""
        return self.members[0].name


def multiple(slopes: torch.Tensor, of: torch.Tensor) -> float | None:
    """Return c > 0 if the vector `slopes` is c times the vector `of` up to rounding, else None.

    If both vectors are 0, the result is 1. If only one of the vectors is 0, the result is None.
    """
    largest = float(slopes.abs().max()) if slopes.numel() else 0.0
    square = float(of @ of)
    if largest == 0.0 or square == 0.0:
        return 1.0 if largest == 0.0 and square == 0.0 else None
    factor = float(slopes @ of) / square
    near = bool((slopes - factor * of).abs().max() <= ROUNDING * largest)
    return factor if near and factor > 0.0 else None


def families(slopes: Mapping[str, torch.Tensor]) -> tuple[Family, ...]:
    """Group the algorithms whose token gradients are proportional.

    `slopes` has the token gradients of each algorithm as a float64 vector.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """The average weight of a token in the loss, for completions of similar length."""

    shortest: int
    longest: int
    completions: int
    gradient: float
    """Mean |d loss / d logp| over the tokens of the completions in this bin."""
    per_advantage: float
    """Sum of |d loss / d logp| divided by the sum of |advantage|: the mean weight of a token in the
    loss. The value is 0 if all advantages are 0.
    """


def length_bins(batch: Batch, gradient: torch.Tensor) -> tuple[LengthBin, ...]:
    """Sort completions into bins by length; return the mean weight of a token in each bin."""
    assert batch.advantage is not None
    lengths = batch.mask.sum(dim=1)
    trained = lengths[lengths > 0].sort().values
    places = [len(trained) * n // BINS for n in range(1, BINS + 1)]
    edges = sorted({int(trained[place - 1]) for place in places if place})
    found, low = [], 0
    for edge in edges:
        rows = (lengths > low) & (lengths <= edge)
        mask = batch.mask[rows]
        size = float(gradient[rows].abs()[mask].double().sum())
        worth = float(batch.advantage[rows].abs()[mask].double().sum())
        found.append(
            LengthBin(
                shortest=int(lengths[rows].min()),
                longest=edge,
                completions=int(rows.sum()),
                gradient=size / int(mask.sum()),
                per_advantage=size / worth if worth else 0.0,
            )
        )
        low = edge
    return tuple(found)
