"""Sums and means of [B, T] tensors over trained tokens, which a bool mask [B, T] selects."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from covey.types import Batch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this absolute value. A probability ratio above e^20 indicates an error,
but the clamp keeps the loss finite."""


def scored_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask [B, T] of the trained tokens in rollouts that have a reward."""
    return batch.mask & ~batch.rewards.isnan()[:, None]


def difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a - b inside the mask and 0 outside the mask, even if a or b is NaN there."""
    # Padding may contain any value, even NaN. It is replaced before the arithmetic and not after,
    # because the gradient of `where` behind a NaN is itself NaN.
    return a.where(mask, 0.0) - b.where(mask, 0.0)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to +-20, so that exp is finite; clamped values have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values over each completion's trained tokens, [B, 1]."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True)


def row_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of trained tokens of each completion, [B, 1]; 1 if there are none."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values over each completion's trained tokens, [B, 1]."""
    return row_sum(values, mask) / row_tokens(mask)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return, at each trained token, the mean of the values over its completion, [B, T].

    Tokens that are not trained get 0. The backward pass also averages the gradient over the
    completion, which leaves it exactly unchanged if it is the same for all tokens, as with one
    advantage per completion. Sequence ratios and token ratios therefore give bit-identical
    gradients wherever these gradients are mathematically equal.
    """
    mean: torch.Tensor = _sequence_mean().apply(values, mask)
    return mean


@cache
def _sequence_mean() -> Any:
    """Return the autograd function of `sequence_mean`.

    The class is made on first use, because its base class would load torch into commands that
    need no torch.
    """

    class SequenceMean(torch.autograd.Function):
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

    return SequenceMean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Copy the value [B, 1] of each completion to its trained tokens [B, T]; other tokens get 0."""
    return values.expand_as(mask).where(mask, 0.0)
