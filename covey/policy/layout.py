"""How prompts and completions are laid out as rows for the model, and where each is predicted.

This is the only place that knows a token is predicted by the position before it.

Shapes: B rows, P prompt tokens, T completion tokens, S columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from covey.types import Batch

Side = Literal["right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Model inputs, and for each completion token the column whose hidden state predicts it."""

    input_ids: torch.Tensor
    """[B, S]."""
    attention_mask: torch.Tensor | None
    """[B, S], or None: padding on the right is never attended to by what comes before it."""
    position_ids: torch.Tensor | None
    """[B, S], or None: columns are positions."""
    predictor: torch.Tensor
    """[B, T] int64 column."""


def lay_out(batch: Batch, *, side: Side = "right", width: int = 0) -> Layout:
    """Place each prompt and its completion in a row of at least `width` columns."""
    rows, prompt_width = batch.prompt_tokens.shape
    completion_width = batch.tokens.shape[1]
    lengths = batch.prompt_lengths + batch.lengths
    columns = max(width, int(lengths.max()))
    device = batch.tokens.device

    ids = batch.tokens.new_zeros(rows, prompt_width + completion_width)
    ids[:, :prompt_width] = batch.prompt_tokens
    place = batch.prompt_lengths[:, None] + torch.arange(completion_width, device=device)
    ids = ids.scatter(1, place, batch.tokens)
    ids = torch.nn.functional.pad(ids, (0, max(0, columns - ids.shape[1])))[:, :columns]
    # A token beyond a completion's end has no place; any valid column will do, it is masked.
    predictor = (place - 1).clamp(max=columns - 1)
    if side == "right":
        return Layout(input_ids=ids, attention_mask=None, position_ids=None, predictor=predictor)

    shift = (columns - lengths)[:, None]
    positions = torch.arange(columns, device=device)[None] - shift
    return Layout(
        input_ids=ids.gather(1, positions.clamp(min=0)),
        attention_mask=(positions >= 0).long(),
        position_ids=positions.clamp(min=0),
        predictor=(predictor + shift).clamp(max=columns - 1),
    )


def micro_batches(batch: Batch, token_budget: int) -> Iterator[torch.Tensor]:
    """Yield the rows of micro-batches that, padded, hold at most `token_budget` tokens each.

    Rows of similar length go together. A single row may exceed the budget: it cannot be split.
    """
    lengths = batch.prompt_lengths + batch.lengths
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        size = max(1, token_budget // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size
