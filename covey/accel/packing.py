"""Laying a batch out for a device, on the CPU and from the CPU's copy of it.

Asking the device for a length or for equal prompts would wait until it has done all its work; so
the layout is computed here from what collate knew, and sent over in one piece.

Shapes: B rows, P prompt tokens, T completion tokens, N packed tokens, R places of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from covey.accel.attention import PaddedRows
from covey.accel.varlen_attention import VarlenRows
from covey.types import Batch, HostRows


def host_rows(batch: Batch) -> HostRows:
    """Return the CPU's copy of a batch, which is fetched if there is none."""
    return batch.host if batch.host is not None else HostRows.of(batch)


def row_of_each(counts: torch.Tensor) -> torch.Tensor:
    """Return the row of every token, of rows that have so many each.

    By numpy: torch would wake all of its threads for it, which took 4 ms on sixteen cores.
    """
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts.numpy()))


def prompt_numbers(host: HostRows) -> torch.Tensor:
    """Return [B] int64: rows with the same prompt have the same number, in order of appearance."""
    numbers: dict[bytes, int] = {}
    prompts = host.prompt_tokens.numpy()
    keys = [prompts[row, :n].tobytes() for row, n in enumerate(host.prompt_lengths.tolist())]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A batch as packed tokens: each prompt once, followed by the completion of its first row."""

    input_ids: torch.Tensor
    """[N] int64."""
    position_ids: torch.Tensor
    """[N] int64."""
    packing: PaddedRows | VarlenRows
    predictor: torch.Tensor
    """[M] int64: the packed token that predicts each trained token."""
    chosen: torch.Tensor
    """[M] int64: the trained tokens."""
    cells: torch.Tensor
    """[M] int64: their places in [B, T], flattened."""


def pack(host: HostRows, device: torch.device, *, varlen: bool) -> PackedBatch:
    """Pack a batch for attention with padded rows or, if `varlen`, without padding."""
    return pack_varlen(host, device) if varlen else _pack_padded(host, device)


def _pack_padded(host: HostRows, device: torch.device) -> PackedBatch:
    """Pack a batch: all prompts, each once and sorted, then all completions."""
    prompts, which = torch.cat([host.prompt_lengths[:, None], host.prompt_tokens], dim=1).unique(
        dim=0, return_inverse=True
    )
    prompt_lengths, prompt_tokens = prompts[:, 0], prompts[:, 1:]
    # The last token of a completion predicts nothing, so the model does not read it.
    lengths = (host.lengths - 1).clamp(min=0)
    prompt_starts = prompt_lengths.cumsum(0) - prompt_lengths
    starts = lengths.cumsum(0) - lengths + prompt_lengths.sum()

    columns = torch.arange(int((host.prompt_lengths + lengths).max()))
    in_prompt = columns < host.prompt_lengths[:, None]
    in_row = columns < (host.prompt_lengths + lengths)[:, None]
    rows = torch.where(
        in_prompt,
        prompt_starts[which][:, None] + columns,
        (starts - host.prompt_lengths)[:, None] + columns,
    ).where(in_row, 0)

    prompt_cells = columns[: prompt_tokens.shape[1]] < prompt_lengths[:, None]
    cells = torch.arange(host.tokens.shape[1]) < lengths[:, None]
    count = int(prompt_lengths.sum() + lengths.sum())
    # A shared prompt takes its hidden states from its first row, so that the choice is fixed.
    home = rows.new_full((count,), rows.numel()).scatter_reduce(
        0, rows[in_row], torch.arange(rows.numel()).view_as(rows)[in_row], "amin"
    )
    place = host.prompt_lengths[:, None] - 1 + torch.arange(host.tokens.shape[1])
    predictor = rows.gather(1, place.clamp(max=rows.shape[1] - 1))
    return PackedBatch(
        input_ids=torch.cat([prompt_tokens[prompt_cells], host.tokens[cells]]).to(device),
        position_ids=(home % rows.shape[1]).to(device),
        packing=PaddedRows(rows=rows.to(device), home=home.to(device)),
        predictor=predictor[host.mask].to(device),
        chosen=host.tokens[host.mask].to(device),
        cells=host.mask.flatten().nonzero().squeeze(1).to(device),
    )


class PackedTables(NamedTuple):
    """The same as tables, with a place for each key whether rows share some or not."""

    input_ids: torch.Tensor
    """[N] int64, and so are the next four, as in PackedRows."""
    position_ids: torch.Tensor
    predictor: torch.Tensor
    chosen: torch.Tensor
    cells: torch.Tensor
    query_starts: torch.Tensor
    """[rows + 1] int32, and so are all that follow, as in Spans."""
    key_starts: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    position: torch.Tensor


class MaxLengths(NamedTuple):
    """Of all rows, the most questions and the most keys."""

    query: int
    key: int


def varlen_tables(host: HostRows) -> tuple[PackedTables, MaxLengths]:
    """Lay a batch out without padding, on the CPU."""
    rows = _Rows.of(host)
    row, position = rows.asking()
    prompt = rows.prompt[row]
    ids = torch.where(
        position < prompt,
        host.prompt_tokens[row, position.clamp(max=host.prompt_tokens.shape[1] - 1)],
        host.tokens[row, (position - prompt).clamp(0, host.tokens.shape[1] - 1)],
    )
    cells = host.mask.flatten().nonzero().squeeze(1)
    where, at = cells // host.mask.shape[1], cells % host.mask.shape[1]
    predictor = torch.where(
        at == 0, (rows.prompt_start + rows.prompt)[where] - 1, rows.start[where] + at - 1
    )
    chosen = host.tokens.flatten()[cells]
    spans = rows.spans(row, position)
    tables = PackedTables._make([ids.long(), position, predictor, chosen.long(), cells, *spans])
    return tables, MaxLengths(int(rows.asks.max()), int(rows.keys().max()))


def pack_varlen(host: HostRows, device: torch.device) -> PackedBatch:
    """Lay a batch out without padding, and send it to a device."""
    tables, longest = varlen_tables(host)
    shared = len(tables.tokens) > len(tables.input_ids)
    return packed_rows(PackedTables._make(to_device(list(tables), device)), longest, shared=shared)


def packed_rows(tables: PackedTables, longest: MaxLengths, *, shared: bool) -> PackedBatch:
    """Return a layout as the model takes it; with `shared`, keys go where their rows are."""
    return PackedBatch(
        input_ids=tables.input_ids,
        position_ids=tables.position_ids,
        predictor=tables.predictor,
        chosen=tables.chosen,
        cells=tables.cells,
        packing=VarlenRows(
            query_starts=tables.query_starts,
            key_starts=tables.key_starts,
            longest_query=longest.query,
            longest_key=longest.key,
            tokens=tables.tokens if shared else None,
            starts=tables.starts if shared else None,
            begin=tables.begin if shared else None,
            end=tables.end if shared else None,
            position=tables.position if shared else None,
        ),
    )


def pack_prompts(prompts: list[tuple[int, ...]], device: torch.device) -> PackedBatch:
    """Lay prompts out one after another, each on its own; the last token of each is predicting."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0)
    ids = torch.from_numpy(np.array(list(chain.from_iterable(prompts)), dtype=np.int64))
    position = torch.arange(len(ids)) - (ends - lengths)[row_of_each(lengths)]
    starts = torch.nn.functional.pad(ends, (1, 0)).int()
    over = to_device([ids, position, ends - 1, starts], device)
    longest = int(lengths.max())
    return PackedBatch(
        input_ids=over[0],
        position_ids=over[1],
        predictor=over[2],
        chosen=over[2][:0],
        cells=over[2][:0],
        packing=VarlenRows(
            query_starts=over[3],
            key_starts=over[3],
            longest_query=longest,
            longest_key=longest,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Where each row's tokens are among the packed ones. All [B] int64, on the CPU."""

    prompt: torch.Tensor
    """Tokens of the prompt."""
    length: torch.Tensor
    """Tokens of the completion that are read: its last one predicts nothing."""
    number: torch.Tensor
    """Which prompt it is."""
    asks: torch.Tensor
    """Questions of the row: its completion, and in the first row of a prompt that too."""
    prompt_start: torch.Tensor
    start: torch.Tensor
    """Of the completion."""

    @staticmethod
    def of(host: HostRows) -> _Rows:
        number, prompt = prompt_numbers(host), host.prompt_lengths.long()
        length = (host.lengths - 1).clamp(min=0)
        count = len(number)
        first = torch.full((int(number.max()) + 1,), count).scatter_reduce(
            0, number, torch.arange(count), "amin"
        )
        home = first[number] == torch.arange(count)
        asks = length + prompt.where(home, 0)
        starts = asks.cumsum(0) - asks
        return _Rows(
            prompt=prompt,
            length=length,
            number=number,
            asks=asks,
            prompt_start=starts[first[number]],
            start=starts + prompt.where(home, 0),
        )

    def asking(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row and position [N] of every packed token."""
        row = row_of_each(self.asks)
        behind = torch.arange(len(row)) - (self.asks.cumsum(0) - self.asks)[row]
        return row, behind + (self.prompt + self.length - self.asks)[row]

    def keys(self) -> torch.Tensor:
        """Return [B] how many keys each row has: none, if it asks nothing."""
        return (self.prompt + self.length).where(self.asks > 0, 0)

    def spans(self, row: torch.Tensor, position: torch.Tensor) -> list[torch.Tensor]:
        """Return what Spans holds, in its order, without rows that ask nothing."""
        keys, kept = self.keys(), self.asks > 0
        holder = row_of_each(keys)
        place = torch.arange(len(holder)) - (keys.cumsum(0) - keys)[holder]
        tokens = torch.where(
            place < self.prompt[holder],
            self.prompt_start[holder] + place,
            (self.start - self.prompt)[holder] + place,
        )
        order = self.number.argsort(stable=True)
        order = order[kept[order]]
        entry = torch.zeros_like(keys)
        entry[order] = torch.arange(len(order))
        # A prompt's tokens are in all of its rows, which stand together; any other is in one.
        sharing = kept.long().new_zeros(len(keys)).index_add(0, self.number, kept.long())
        begin, in_prompt = entry[row], position < self.prompt[row]
        end = begin + sharing[self.number][row].where(in_prompt, 1)
        bounds = [torch.nn.functional.pad(n[kept].cumsum(0), (1, 0)) for n in (self.asks, keys)]
        table = [*bounds, tokens, (keys.cumsum(0) - keys)[order], begin, end, position]
        return [part.int() for part in table]


def to_device(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Send tensors of 4 or 8 bytes an element to a device in one piece, without waiting for it."""
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    wide = [p.numel() * p.element_size() + (-p.numel() * p.element_size()) % 8 for p in parts]
    whole = torch.empty(sum(wide), dtype=torch.uint8, pin_memory=True)
    for part, room in zip(parts, whole.split(wide), strict=True):
        room[: part.numel() * part.element_size()].view(part.dtype).copy_(part.flatten())
    over = whole.to(device, non_blocking=True).split(wide)
    return [
        room[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        for part, room in zip(parts, over, strict=True)
    ]
