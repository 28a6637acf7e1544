"""Padded batches: one prompt and its completion per row.

The module accel/packing.py lays out a batch without padding. Padded and packed layouts both record
which position predicts each token.

The dimensions of shapes are B (rows), P (prompt tokens), T (completion tokens) and S (columns of a
row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from covey.types import Batch

Side = Literal["right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """Padded model inputs, and the column that predicts each completion token."""

    input_ids: torch.Tensor
    """[B, S]."""
    attention_mask: torch.Tensor | None
    """[B, S] attention mask. The mask is None if padding is on the right, because causal attention
    ignores padding on the right."""
    position_ids: torch.Tensor | None
    """[B, S] position ids. The field is None if a token's position is its column index."""
    predictor: torch.Tensor
    """[B, T] int64: the column that predicts each completion token."""


def pad_batch(batch: Batch, *, side: Side = "right", width: int = 0) -> PaddedBatch:
    """Lay out each prompt and its completion in a row of at least `width` columns."""
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
    # Tokens past the end of a completion are masked, so any valid column index will do.
    predictor = (place - 1).clamp(max=columns - 1)
    if side == "right":
        return PaddedBatch(
            input_ids=ids, attention_mask=None, position_ids=None, predictor=predictor
        )

    shift = (columns - lengths)[:, None]
    positions = torch.arange(columns, device=device)[None] - shift
    return PaddedBatch(
        input_ids=ids.gather(1, positions.clamp(min=0)),
        attention_mask=(positions >= 0).long(),
        position_ids=positions.clamp(min=0),
        predictor=(predictor + shift).clamp(max=columns - 1),
    )
