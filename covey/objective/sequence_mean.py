"""The mean over each completion's tokens; averaging equal gradients leaves them unchanged."""

from __future__ import annotations

from typing import Any

import torch

from covey.objective.masked import row_mean, spread


class SequenceMean(torch.autograd.Function):
    """The autograd function that copies the mean of each completion to all its tokens.

    See `masked.sequence_mean`.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return, for each token, the mean over the tokens of its completion."""
        ctx.save_for_backward(mask)
        return spread(row_mean(values, mask), mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return, for each token, the mean gradient over the tokens of its completion."""
        (mask,), (grad,) = ctx.saved_tensors, grads
        if not grad.shape[1]:
            return grad, None
        # The mean is taken around the first trained token's value, so that equal numbers have
        # exactly that mean.
        first = grad.gather(1, mask.long().argmax(dim=1, keepdim=True))
        return spread(first + row_mean(grad - first, mask), mask), None
