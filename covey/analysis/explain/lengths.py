"""Whether a token counts more in a short answer than in a long one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.types import Batch

BINS = 4
"""Into how many parts, of as many answers each, answers are put by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """How much the tokens of answers of some length count."""

    shortest: int
    longest: int
    answers: int
    gradient: float
    """Mean |d loss / d logp| of their tokens."""
    per_advantage: float
    """Sum of |d loss / d logp| by sum of |advantage|: the weight of a token, but for what it is
    worth. 0 where there is no advantage."""


def length_bins(batch: Batch, gradient: torch.Tensor) -> tuple[LengthBin, ...]:
    """Put answers into bins by how many of their tokens are trained, and weigh those tokens."""
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
                answers=int(rows.sum()),
                gradient=size / int(mask.sum()),
                per_advantage=size / worth if worth else 0.0,
            )
        )
        low = edge
    return tuple(found)
