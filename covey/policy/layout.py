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

PASS_TOKENS = {True: 200, False: 8192}
"""What one more pass through the model costs, in tokens, on a CPU and elsewhere (measured)."""


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

    Rows of similar length go together, cut where that saves more padding than another pass through
    the model costs. A single row may exceed the budget: it cannot be split.
    """
    lengths = batch.prompt_lengths + batch.lengths
    order = lengths.argsort(descending=True, stable=True)
    pass_tokens = PASS_TOKENS[batch.tokens.device.type == "cpu"]
    start = 0
    for size in _cut(lengths[order].tolist(), token_budget, pass_tokens):
        yield order[start : start + size]
        start += size


def _cut(lengths: list[int], token_budget: int, pass_tokens: int) -> list[int]:
    """Return the sizes of consecutive parts of falling `lengths` that cost least in all.

    A part costs rows x its longest row, plus `pass_tokens`. Solved from the end, with cuts between
    rows of different length or where the budget ends: exact unless the budget binds, then close.
    """
    count = len(lengths)
    best = [0.0] * (count + 1)
    size = [0] * count
    edges = [i for i in range(1, count) if lengths[i] < lengths[i - 1]] + [count]
    for start in reversed(range(count)):
        room = max(1, token_budget // lengths[start])
        ends = {min(start + room, count), *(e for e in edges if start < e <= start + room)}
        cost, end = min((lengths[start] * (e - start) + pass_tokens + best[e], e) for e in ends)
        best[start], size[start] = cost, end - start
    sizes, at = [], 0
    while at < count:
        sizes.append(size[at])
        at += size[at]
    return sizes
