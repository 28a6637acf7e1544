"""How prompts and completions are laid out for the model, and where each token is predicted.

This is the only place that knows a token is predicted by the position before it.

Shapes: B rows, P prompt tokens, T completion tokens, S columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from covey.accel.attention import Packing
from covey.accel.packing import PackedRows, balanced, pack_spans
from covey.types import Batch, HostRows

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A batch as one row of tokens without padding; prompts that rows share stand in it once."""

    input_ids: torch.Tensor
    """[1, N]."""
    position_ids: torch.Tensor
    """[1, N]."""
    packing: Packing
    predictor: torch.Tensor
    """[B, T] int64: the packed token whose hidden state predicts each completion token."""


def pack(batch: Batch | HostRows) -> Packed:
    """Lay a batch out without padding."""
    device = batch.tokens.device
    prompts, which = torch.cat([batch.prompt_lengths[:, None], batch.prompt_tokens], dim=1).unique(
        dim=0, return_inverse=True
    )
    prompt_lengths, prompt_tokens = prompts[:, 0], prompts[:, 1:]
    # A completion's last token predicts nothing, so it is never read.
    lengths = (batch.lengths - 1).clamp(min=0)
    prompt_starts = prompt_lengths.cumsum(0) - prompt_lengths
    starts = lengths.cumsum(0) - lengths + prompt_lengths.sum()

    columns = torch.arange(int((batch.prompt_lengths + lengths).max()), device=device)
    in_prompt = columns < batch.prompt_lengths[:, None]
    in_row = columns < (batch.prompt_lengths + lengths)[:, None]
    rows = torch.where(
        in_prompt,
        prompt_starts[which][:, None] + columns,
        (starts - batch.prompt_lengths)[:, None] + columns,
    ).where(in_row, 0)

    prompt_cells = columns[: prompt_tokens.shape[1]] < prompt_lengths[:, None]
    cells = torch.arange(batch.tokens.shape[1], device=device) < lengths[:, None]
    count = int(prompt_lengths.sum() + lengths.sum())
    # Of the rows that share a prompt, the first is its home: any would do, but always the same.
    home = rows.new_full((count,), rows.numel()).scatter_reduce(
        0, rows[in_row], torch.arange(rows.numel(), device=device).view_as(rows)[in_row], "amin"
    )
    place = batch.prompt_lengths[:, None] - 1 + torch.arange(batch.tokens.shape[1], device=device)
    return Packed(
        input_ids=torch.cat([prompt_tokens[prompt_cells], batch.tokens[cells]])[None],
        position_ids=(home % rows.shape[1])[None],
        packing=Packing(rows=rows, home=home),
        predictor=rows.gather(1, place.clamp(max=rows.shape[1] - 1)),
    )


def pack_for(host: HostRows, device: torch.device, *, flash: bool) -> PackedRows:
    """Lay a batch out for a device, for attention with padding or, by flash kernels, without."""
    if flash:
        return pack_spans(host, device)
    packed = pack(host)
    return PackedRows(
        input_ids=packed.input_ids[0].to(device),
        position_ids=packed.position_ids[0].to(device),
        packing=Packing(rows=packed.packing.rows.to(device), home=packed.packing.home.to(device)),
        predictor=packed.predictor[host.mask].to(device),
        chosen=host.tokens[host.mask].to(device),
        cells=host.mask.flatten().nonzero().squeeze(1).to(device),
    )


def trial_batch(prompt: torch.Tensor, lengths: torch.Tensor) -> Batch:
    """Return a batch that repeats a prompt's tokens as completions of the given lengths."""
    rows, longest = len(lengths), int(lengths.max())
    mask = torch.arange(longest, device=prompt.device) < lengths[:, None]
    zeros = torch.zeros(rows, device=prompt.device)
    return Batch(
        prompt_tokens=prompt.expand(rows, -1),
        prompt_lengths=torch.full_like(lengths, len(prompt)),
        tokens=prompt[torch.arange(longest, device=prompt.device) % len(prompt)].where(mask, 0),
        lengths=lengths,
        mask=mask,
        sampler_logp=zeros[:, None].expand(-1, longest),
        rewards=zeros.double(),
        success=zeros.bool(),
        group=torch.zeros_like(lengths),
        truncated=zeros.bool(),
    )


def micro_batches(batch: Batch, micro_batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the rows of micro-batches that hold at most `micro_batch_tokens` tokens each.

    On a CPU they count as padded; on a device, where nothing is padded, as packed.
    """
    if batch.tokens.device.type == "cpu":
        return padded_parts(batch, micro_batch_tokens)
    return iter(balanced(batch, micro_batch_tokens))


def padded_parts(batch: Batch, micro_batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the rows of parts that, padded, hold at most `micro_batch_tokens` tokens each.

    Rows of similar length go together. A single row may exceed the budget: it cannot be split.
    """
    lengths = batch.prompt_lengths + batch.lengths
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        size = max(1, micro_batch_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size
