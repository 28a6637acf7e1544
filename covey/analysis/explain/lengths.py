"""Length bias: the weight of a token by the length of its completion."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.types import Batch

BINS = 4
"""Number of bins, with equally many completions each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Weight of the tokens in completions of similar length."""

    shortest: int
    longest: int
    completions: int
    gradient: float
    """Mean |d loss / d logp| over their tokens."""
    per_advantage: float
    """Sum of |d loss / d logp| divided by the sum of |advantage|: the weight of a token apart from
    its advantage. 0 if there is no advantage."""


def length_bins(batch: Batch, gradient: torch.Tensor) -> tuple[LengthBin, ...]:
    """Bin completions by their number of trained tokens, and measure the weight of those tokens."""
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
