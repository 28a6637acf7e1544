"""Sums and means over the trained tokens of tensors [B, T], given a bool mask [B, T]."""

from __future__ import annotations

from typing import Any

import torch

MAX_LOG_RATIO = 20.0
"""The upper bound of the absolute log-ratio. A ratio above e^20 indicates an error, but must stay
finite."""


def difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a - b inside the mask, and 0 outside, even where a or b is NaN."""
    # Padding may contain any value, even NaN. It is replaced before the arithmetic and not after,
    # because the gradient of `where` behind a NaN is itself NaN.
    return a.where(mask, 0.0) - b.where(mask, 0.0)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to +-20, so that exp is finite; clamped values have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum over the trained tokens of each completion, [B, 1]."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True)


def row_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of trained tokens of each completion, [B, 1]; at least 1, as a divisor."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the trained tokens of each completion, [B, 1]."""
    return row_sum(values, mask) / row_tokens(mask)


class _SequenceMean(torch.autograd.Function):
    """The autograd function that copies the mean of each completion to all its tokens.

    See `sequence_mean`.
    """

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
    """Copy the mean of each completion to its trained tokens [B, T]; other tokens get 0.

    The gradient is also the mean over the completion. If all tokens of a completion have the same
    gradient, as with one advantage per completion, the result is exactly this gradient. So sequence
    ratios and token ratios give bit-identical gradients wherever these gradients are mathematically
    equal.
    """
    mean: torch.Tensor = _SequenceMean.apply(values, mask)
    return mean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Copy the value [B, 1] of each completion to its trained tokens [B, T]; other tokens get 0."""
    return values.expand_as(mask).where(mask, 0.0)
