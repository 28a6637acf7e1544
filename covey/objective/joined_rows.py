"""Joins all rows of a rollout into one row, because statistics are per rollout, not per row.

If the chat template rewrites earlier turns, a rollout has several rows in a batch, but its
advantage, importance-sampling corrections and `marks` depend on all of its tokens. Covey computes
such values on joined rows and then splits them into the original rows, with the same result as if
each rollout had one row. Shapes: B is the number of rows, T the number of tokens per row, R the
number of rollouts, and W the number of tokens in the longest rollout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from covey.types import Batch

Values = TypeVar("Values", "torch.Tensor", "torch.Tensor | None")


class Joined(NamedTuple):
    """A batch with one row per rollout, and each original token's position in this batch."""

    batch: Batch
    row: torch.Tensor | None = None
    """[B, T] int64: the row of each token in the joined batch; None if no rows were joined."""
    column: torch.Tensor | None = None
    """[B, T] int64: the column of each token in the joined batch."""
    cells: torch.Tensor | None = None
    """[B, T] bool: mask of the tokens that are not padding."""

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
    """Join the rows of each rollout in order; keep `batch` if each rollout has one row."""
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
