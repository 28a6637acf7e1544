"""Tensors [B, T] of which only the trained tokens count, mask [B, T] bool."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Beyond e^20 a ratio says only that something is wrong; it must still be finite."""


def difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """a - b, and 0 outside the mask whatever stands there."""
    # Padding may hold anything, NaN included, so it is replaced before the arithmetic, not after:
    # a gradient that passes through `where` on the far side of a NaN is itself NaN.
    return a.where(mask, 0.0) - b.where(mask, 0.0)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to +-20, so that its exponential is finite; beyond, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the trained tokens of each answer, [B, 1]."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True)


def row_tokens(mask: torch.Tensor) -> torch.Tensor:
    """T_i, the trained tokens of each answer, [B, 1]; at least 1, so that it can divide."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the trained tokens of each answer, [B, 1]."""
    return row_sum(values, mask) / row_tokens(mask)


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the value [B, 1] of its answer: [B, T], 0 elsewhere."""
    return values.expand_as(mask).where(mask, 0.0)
