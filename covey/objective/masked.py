"""Tensors [B, T] of which only the trained tokens count, mask [B, T] bool."""

from __future__ import annotations

from typing import Any

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


class _SequenceMean(torch.autograd.Function):
    """The mean of each answer, handed to all of its tokens. See `sequence_mean`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return spread(row_mean(values, mask), mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,), (grad,) = ctx.saved_tensors, grads
        if not grad.shape[1]:
            return grad, None
        # Around the first trained token's own, so that equal numbers have exactly that mean.
        first = grad.gather(1, mask.long().argmax(dim=1, keepdim=True))
        return spread(first + row_mean(grad - first, mask), mask), None


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the mean of its answer: [B, T], 0 elsewhere.

    The gradient is the mean too. Where all tokens of an answer receive the same, which is what one
    advantage for the answer comes to, each passes on exactly what it received, so that a ratio of
    the answer and ratios of its tokens have the same gradient to the last bit where they have the
    same gradient at all.
    """
    mean: torch.Tensor = _SequenceMean.apply(values, mask)
    return mean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the value [B, 1] of its answer: [B, T], 0 elsewhere."""
    return values.expand_as(mask).where(mask, 0.0)
