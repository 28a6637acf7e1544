"""Sums and means of [B, T] tensors over trained tokens, which a bool mask [B, T] selects.

If a rollout has several rows, the module joins these rows, so that a sum covers the whole rollout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from covey.types import Batch

Values = TypeVar("Values", "torch.Tensor", "torch.Tensor | None")
MAX_LOG_RATIO = 20.0
"""Maximum absolute value of log-ratios, to which larger log-ratios are clamped. A probability ratio
above e^20 indicates an error, but the clamp keeps the loss finite."""


def scored_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask [B, T] of the trained tokens in rollouts that have a reward."""
    return batch.mask & ~batch.rewards.isnan()[:, None]


def difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a - b inside the mask and 0 outside the mask, even for NaN in a or b."""
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
    """Return the number of trained tokens of each completion, but at least 1, as [B, 1]."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values over each completion's trained tokens, [B, 1]."""
    return row_sum(values, mask) / row_tokens(mask)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return, at each trained token, the mean of the values over the token's completion, [B, T].

    Tokens that are not trained get 0. The backward pass averages the gradient over the completion,
    as the forward pass averages the values. If all tokens of a completion have the same gradient,
    averaging leaves the gradient exactly unchanged. If the gradients under sequence ratios and
    token ratios are mathematically equal, they are also bit-identical.
    """
    mean: torch.Tensor = _sequence_mean().apply(values, mask)
    return mean


@cache
def _sequence_mean() -> Any:
    """Return the autograd function of `sequence_mean`.

    The class is created on first use, because its base class needs torch, which some commands do
    not import.
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
            # Differences from the first trained token's value are averaged, so that the mean of
            # equal numbers is exact.
            first = grad.gather(1, mask.long().argmax(dim=1, keepdim=True))
            return spread(first + row_mean(grad - first, mask), mask), None

    return SequenceMean


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Copy the value [B, 1] of each completion to its trained tokens [B, T]; other tokens get 0."""
    return values.expand_as(mask).where(mask, 0.0)


# Joins all rows of a rollout into one row, because statistics are per rollout, not per row.
#
# If the chat template rewrites earlier turns, a rollout has several rows in a batch, but
# advantages, importance-sampling corrections and the results of `marks` depend on all its tokens.
# Covey computes such values on joined rows and then splits them into the original rows, with the
# same result as if each rollout had one row. Shapes: B is the number of rows, T the number of
# tokens per row, R the number of rollouts, and W the number of tokens in the longest rollout.


class Joined(NamedTuple):
    """A batch with one row per rollout, and the new position of each original token."""

    batch: Batch
    row: torch.Tensor | None = None
    """The row of each token in the joined batch, int64 [B, T]; None if no rows were joined."""
    column: torch.Tensor | None = None
    """The column of each token in the joined batch, int64 [B, T]."""
    cells: torch.Tensor | None = None
    """Mask of the tokens that are not padding, bool [B, T]."""

    def split(self, values: Values) -> Values:
        """Split values [R, W] of joined rows into the original rows [B, T]; padding gets 0."""
        if values is None or self.row is None or self.column is None or self.cells is None:
            return values
        return values[self.row, self.column].masked_fill(~self.cells, 0)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Join values [B, T] of the original rows into joined rows [R, W]; padding gets 0."""
        if self.row is None or self.column is None or self.cells is None:
            return values
        whole = values.new_zeros(self.batch.tokens.shape)
        whole[self.row[self.cells], self.column[self.cells]] = values[self.cells]
        return whole


def joined(batch: Batch) -> Joined:
    """Join the rows of each rollout in order; return `batch` itself if each rollout has one row."""
    if batch.one_row_each:
        return Joined(batch)
    assert batch.rollout is not None
    ids, place = batch.rollout.unique(return_inverse=True)
    same = place[:, None] == place[None]
    before = (same.tril(-1) * batch.lengths[None]).sum(dim=1)
    lengths = batch.lengths.new_zeros(len(ids)).index_add(0, place, batch.lengths)
    columns = torch.arange(batch.tokens.shape[1], device=place.device)
    cells = columns < batch.lengths[:, None]
    column = (before[:, None] + columns).where(cells, 0)
    first = (~same.tril(-1).any(dim=1)).nonzero().squeeze(1)
    first = first[place[first].argsort()]
    blank = batch.tokens.new_zeros(len(ids), max(1, int(lengths.max())))
    shape = Joined(replace(batch, tokens=blank), place[:, None].expand_as(cells), column, cells)
    changes: dict[str, Any] = {
        name: shape.join(value)
        if value.ndim == 2 and name not in ("prompt_tokens", "parts")
        else value[first]
        for name in batch.__slots__
        if isinstance(value := getattr(batch, name), torch.Tensor)
    }
    changes |= {"lengths": lengths, "host": None}
    return shape._replace(batch=replace(batch, **changes))
