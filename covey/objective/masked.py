"""Sums and means over the trained tokens of tensors [B, T], with mask [B, T] bool."""

from __future__ import annotations

from typing import Any

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


class _SequenceMean(torch.autograd.Function):
    """The mean of each completion, given to all of its tokens. See `sequence_mean`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return spread(row_mean(values, mask), mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,), (grad,) = ctx.saved_tensors, grads
        if not grad.shape[1]:
            return grad, None
        # The mean is taken around the first trained token's value, so that equal numbers have
        # exactly that mean.
        first = grad.gather(1, mask.long().argmax(dim=1, keepdim=True))
        return spread(first + row_mean(grad - first, mask), mask), None


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the mean of its completion: [B, T], 0 elsewhere.

    The gradient is also the mean over the completion. If all tokens of a completion receive the
    same gradient, as with one advantage per completion, each token passes on exactly that value. So
    ratios of completions and ratios of tokens agree to the last bit wherever their gradients are
    mathematically equal.
    """
    mean: torch.Tensor = _SequenceMean.apply(values, mask)
    return mean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the value [B, 1] of its completion: [B, T], 0 elsewhere."""
    return values.expand_as(mask).where(mask, 0.0)
