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

from covey.accel.attention import Packing
from covey.accel.varlen_attention import Spans
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
class PackedRows:
    """A batch as packed tokens: each prompt once, followed by the completion of its first row."""

    input_ids: torch.Tensor
    """[N] int64."""
    position_ids: torch.Tensor
    """[N] int64."""
    packing: Packing | Spans
    predictor: torch.Tensor
    """[M] int64: the packed token that predicts each trained token."""
    chosen: torch.Tensor
    """[M] int64: the trained tokens."""
    cells: torch.Tensor
    """[M] int64: their places in [B, T], flattened."""


class Tables(NamedTuple):
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


class Longest(NamedTuple):
    """Of all rows, the most questions and the most keys."""

    query: int
    key: int


def lay_spans(host: HostRows) -> tuple[Tables, Longest]:
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
    tables = Tables._make([ids.long(), position, predictor, chosen.long(), cells, *spans])
    return tables, Longest(int(rows.asks.max()), int(rows.keys().max()))


def pack_spans(host: HostRows, device: torch.device) -> PackedRows:
    """Lay a batch out without padding, and send it to a device."""
    tables, longest = lay_spans(host)
    shared = len(tables.tokens) > len(tables.input_ids)
    return packed_rows(Tables._make(sent(list(tables), device)), longest, shared=shared)


def packed_rows(tables: Tables, longest: Longest, *, shared: bool) -> PackedRows:
    """Return a layout as the model takes it; with `shared`, keys go where their rows are."""
    return PackedRows(
        input_ids=tables.input_ids,
        position_ids=tables.position_ids,
        predictor=tables.predictor,
        chosen=tables.chosen,
        cells=tables.cells,
        packing=Spans(
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


def pack_prompts(prompts: list[tuple[int, ...]], device: torch.device) -> PackedRows:
    """Lay prompts out one after another, each on its own; the last token of each is predicting."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0)
    ids = torch.from_numpy(np.array(list(chain.from_iterable(prompts)), dtype=np.int64))
    position = torch.arange(len(ids)) - (ends - lengths)[row_of_each(lengths)]
    starts = torch.nn.functional.pad(ends, (1, 0)).int()
    over = sent([ids, position, ends - 1, starts], device)
    longest = int(lengths.max())
    return PackedRows(
        input_ids=over[0],
        position_ids=over[1],
        predictor=over[2],
        chosen=over[2][:0],
        cells=over[2][:0],
        packing=Spans(
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


def sent(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
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


def balanced(batch: Batch, micro_batch_tokens: int) -> list[torch.Tensor]:
    """Return the rows of micro-batches of at most `micro_batch_tokens` packed tokens, alike in size.

    Rows that share a prompt stay together where the budget allows it: it is then read once. A
    single row may exceed the budget: it cannot be split.
    """
    host = host_rows(batch)
    number, prompt = prompt_numbers(host), host.prompt_lengths.tolist()
    lengths = (host.lengths - 1).clamp(min=0).tolist()
    sharing: dict[int, list[int]] = {}
    for row, which in enumerate(number.tolist()):
        sharing.setdefault(which, []).append(row)
    if sum(lengths) + sum(prompt[rows[0]] for rows in sharing.values()) <= micro_batch_tokens:
        return [torch.arange(len(lengths))]
    pieces: list[tuple[int, list[int]]] = []
    for rows in sharing.values():
        pieces += _pieces(rows, prompt[rows[0]], lengths, micro_batch_tokens)
    pieces.sort(key=lambda piece: -piece[0])
    count = max(1, -(-sum(size for size, _ in pieces) // micro_batch_tokens))
    while True:
        parts = _spread(pieces, count)
        # With as many parts as pieces nothing can be done about one that is too large.
        if count >= len(pieces) or max(size for size, _ in parts) <= micro_batch_tokens:
            return [torch.tensor(sorted(rows)) for _, rows in parts if rows]
        count += 1


def _pieces(
    rows: list[int], prompt: int, lengths: list[int], micro_batch_tokens: int
) -> list[tuple[int, list[int]]]:
    """Cut the rows of a prompt into pieces within the budget, each with its packed tokens."""
    pieces: list[tuple[int, list[int]]] = []
    for row in rows:
        if not pieces or pieces[-1][0] + lengths[row] > micro_batch_tokens:
            pieces.append((prompt, []))
        size, members = pieces[-1]
        pieces[-1] = (size + lengths[row], [*members, row])
    return pieces


def _spread(pieces: list[tuple[int, list[int]]], count: int) -> list[tuple[int, list[int]]]:
    """Give each piece, the largest first, to the part that has least."""
    parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
    for size, rows in pieces:
        least = min(range(count), key=lambda i: parts[i][0])
        parts[least] = (parts[least][0] + size, [*parts[least][1], *rows])
    return parts
