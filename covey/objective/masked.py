"""Sums and means over the trained tokens of tensors [B, T], with mask [B, T] bool."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""The bound of log-ratios. A ratio beyond e^20 is a sign of an error, but must stay finite."""


def difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """a - b, and 0 outside the mask, whatever values a and b have there."""
    # Padding may contain any value, even NaN. It is replaced before the arithmetic and not after,
    # because the gradient of `where` behind a NaN is itself NaN.
    return a.where(mask, 0.0) - b.where(mask, 0.0)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to +-20, so that the exponential is finite; the gradient of clamped values is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the trained tokens of each completion, [B, 1]."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True)


def row_tokens(mask: torch.Tensor) -> torch.Tensor:
    """T_i, the number of trained tokens of each completion, [B, 1]; at least 1, to divide by it."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the trained tokens of each completion, [B, 1]."""
    return row_sum(values, mask) / row_tokens(mask)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the mean of its completion: [B, T], 0 elsewhere.

    The gradient is also the mean over the completion. If all tokens of a completion receive the
    same gradient, as with one advantage per completion, each token passes on exactly that value. So
    ratios of completions and ratios of tokens agree to the last bit wherever their gradients are
    mathematically equal.
    """
    from covey.objective.sequence_mean import SequenceMean  # its base class is torch's

    mean: torch.Tensor = SequenceMean.apply(values, mask)
    return mean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the value [B, 1] of its completion: [B, T], 0 elsewhere."""
    return values.expand_as(mask).where(mask, 0.0)
