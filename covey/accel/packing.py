"""Pack a batch into one sequence without padding, and store each shared prompt only once.

The CPU computes the layout of the packed row, and sends the layout to the device in one transfer.
If the GPU computed the layout, copying a length to the CPU would wait for all queued GPU work.

The dimensions in tensor shapes are B (rows), P (prompt tokens), T (completion tokens), N (packed
tokens) and R (key positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from covey.accel.attention import PaddedRows
from covey.accel.attention_kernels import Bounds, KeyIndex, VarlenRows
from covey.accel.sizes import padded_tokens, power_of_two, round_up
from covey.types import Batch, HostRows


def host_rows(batch: Batch) -> HostRows:
    """Return the CPU copy of a batch's layout; make the copy if the batch has none."""
    return batch.host if batch.host is not None else HostRows.of(batch)


def row_of_each(counts: torch.Tensor) -> torch.Tensor:
    """Return the row index of every token, given the number of tokens per row.

    This function uses numpy, because torch would wake all of its threads, which took 4 ms on 16
    cores.
    """
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts.numpy()))


def prompt_numbers(host: HostRows) -> torch.Tensor:
    """Return [B] int64: the index of each row's prompt; equal prompts have equal indices."""
    numbers: dict[bytes, int] = {}
    prompts = host.prompt_tokens.numpy()
    keys = [prompts[row, :n].tobytes() for row, n in enumerate(host.prompt_lengths.tolist())]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A packed batch: the model's inputs, and the indices of the tokens to train on."""

    input_ids: torch.Tensor
    """[N] int64."""
    position_ids: torch.Tensor
    """[N] int64."""
    packing: PaddedRows | VarlenRows
    predictor: torch.Tensor
    """[M] int64: the index of the packed token that predicts each trained token."""
    chosen: torch.Tensor
    """[M] int64: the token ids of the trained tokens."""
    cells: torch.Tensor
    """[M] int64: the flat index of each trained token in [B, T]."""


def pack(host: HostRows, device: torch.device, *, varlen: bool) -> PackedBatch:
    """Pack a batch; attention uses padded rows, or unpadded rows if `varlen` is true.

    With unpadded rows, a shared prompt is packed directly before its first completion.
    """
    if not varlen:
        return _pack_padded(host, device)
    tables, longest = varlen_tables(host)
    shared = len(tables.tokens) > len(tables.input_ids)
    bounds = Bounds(tuple(tables.query_starts.tolist()), tuple(tables.key_starts.tolist()))
    tables = PackedTables._make(to_device(list(tables), device))
    return packed_batch(tables, longest, shared=shared, bounds=bounds)


def _pack_padded(host: HostRows, device: torch.device) -> PackedBatch:
    """Pack a batch: first the distinct prompts in sorted order, then all completions."""
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
    # The hidden states of a shared prompt come from its first row, so that the choice is fixed.
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
    """The token ids and index tables of a packed batch, for flash attention."""

    input_ids: torch.Tensor
    """[N] int64; the fields have the same meaning as the fields of PackedBatch with the same
    names."""
    position_ids: torch.Tensor
    predictor: torch.Tensor
    chosen: torch.Tensor
    cells: torch.Tensor
    query_starts: torch.Tensor
    """[rows + 1] int32; `query_starts` and `key_starts` have the same meaning as in VarlenRows."""
    key_starts: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    position: torch.Tensor

    @staticmethod
    def of(wide: Sequence[Numbers], narrow: Sequence[Numbers]) -> PackedTables:
        """Make int64 tensors from the `wide` tables, and int32 tensors from the `narrow` tables."""
        tables = [torch.from_numpy(table.astype(np.int64, copy=False)) for table in wide]
        tables += [torch.from_numpy(table.astype(np.int32)) for table in narrow]
        return PackedTables._make(tables)


class MaxLengths(NamedTuple):
    """The largest number of queries in a row, and the largest number of keys in a row."""

    query: int
    key: int


def varlen_tables(host: HostRows) -> tuple[PackedTables, MaxLengths]:
    """Compute the index tables of a batch on the CPU.

    The function must be fast, because the device may be idle while it runs. For speed, the function
    uses numpy (see `row_of_each`), and repeats per-row values with `np.repeat` instead of indexing
    them for every token.
    """
    rows = _RowIndex.of(host)
    chosen, at = host.mask.numpy().nonzero()
    predictor = np.where(
        at == 0, (rows.prompt_start + rows.prompt)[chosen] - 1, rows.start[chosen] + at - 1
    )
    cells = chosen * host.mask.shape[1] + at
    position = rows.positions()
    wide = [rows.ids(host), position, predictor, host.tokens.numpy()[chosen, at], cells]
    longest = MaxLengths(int(rows.queries.max()), int(rows.keys.max()))
    return PackedTables.of(wide, rows.spans(position)), longest


def packed_batch(
    tables: PackedTables,
    longest: MaxLengths,
    *,
    shared: bool,
    bounds: Bounds | None = None,
) -> PackedBatch:
    """Build a PackedBatch from index tables; `shared` says whether rows share prompts."""
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
            shared=KeyIndex._make(tables[-5:]) if shared else None,
            bounds=bounds,
        ),
    )


def prompt_tables(prompts: Sequence[tuple[int, ...]]) -> tuple[PackedTables, MaxLengths]:
    """Compute, on the CPU, the index tables for prompts that are packed one after another.

    The model predicts the first token after each prompt. Because the first token after a prompt is
    not known yet, the token ids in `chosen` are 0.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    ends = lengths.cumsum()
    row = np.repeat(np.arange(len(prompts)), lengths)
    ids = np.fromiter(chain.from_iterable(prompts), dtype=np.int64, count=len(row))
    number = np.arange(len(row))
    position = number - (ends - lengths)[row]
    starts = np.concatenate([[0], ends])
    wide = [ids, position, ends - 1, np.zeros_like(ends), np.zeros_like(ends)]
    spans = [starts, starts, number, ends - lengths, row, row + 1, position]
    longest = int(lengths.max())
    return PackedTables.of(wide, spans), MaxLengths(longest, longest)


def pack_prompts(prompts: Sequence[tuple[int, ...]], device: torch.device) -> PackedBatch:
    """Pack prompts one after another, to predict the first token after each prompt."""
    tables, longest = prompt_tables(prompts)
    tables = PackedTables._make(to_device(list(tables), device))
    return packed_batch(tables, longest, shared=False)


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowIndex:
    """The position of each row's tokens in the packed sequence; all fields are [B]."""

    prompt: Numbers
    """Prompt tokens."""
    length: Numbers
    """Number of completion tokens in the model's input: all completion tokens except the last."""
    number: Numbers
    """Index of the row's prompt."""
    home: npt.NDArray[np.bool_]
    """Whether the row is the first of all rows with the same prompt; the first row has the prompt's
    queries."""
    prompt_start: Numbers

    @staticmethod
    def of(host: HostRows) -> _RowIndex:
        number, prompt = prompt_numbers(host).numpy(), host.prompt_lengths.numpy().astype(np.int64)
        length = np.maximum(host.lengths.numpy().astype(np.int64) - 1, 0)
        _, first = np.unique(number, return_index=True)
        home = first[number] == np.arange(len(number))
        starts = _starts(length + np.where(home, prompt, 0))
        return _RowIndex(
            prompt=prompt, length=length, number=number, home=home,
            prompt_start=starts[first[number]],
        )  # fmt: skip

    @property
    def queries(self) -> Numbers:
        """Queries per row: completion tokens, plus the prompt's tokens if `home` is true."""
        return self.length + np.where(self.home, self.prompt, 0)

    @property
    def keys(self) -> Numbers:
        """The number of keys of each row, or 0 for a row without queries."""
        return np.where(self.queries > 0, self.prompt + self.length, 0)

    @property
    def start(self) -> Numbers:
        """Index of each completion's first token in the packed sequence."""
        return _starts(self.queries) + np.where(self.home, self.prompt, 0)

    def ids(self, host: HostRows) -> Numbers:
        columns, width = np.arange(host.prompt_tokens.shape[1]), host.tokens.shape[1]
        in_prompt = (columns < self.prompt[:, None]) & self.home[:, None]
        in_completion = np.arange(width) < self.length[:, None]
        ids = np.concatenate([host.prompt_tokens.numpy(), host.tokens.numpy()], axis=1)
        found: Numbers = ids[np.concatenate([in_prompt, in_completion], axis=1)]
        return found

    def positions(self) -> Numbers:
        """Return the position [N] of every packed token in its row."""
        queries = self.queries
        before = self.prompt + self.length - queries
        found: Numbers = np.arange(queries.sum()) + np.repeat(before - _starts(queries), queries)
        return found

    def spans(self, position: Numbers) -> list[Numbers]:
        """Return the last seven tables of PackedTables; rows without queries are left out."""
        queries, keys = self.queries, self.keys
        kept, starts = queries > 0, _starts(keys)
        place = np.arange(keys.sum()) - np.repeat(starts, keys)
        of_prompt = np.repeat(self.prompt_start, keys)
        of_completion = np.repeat(self.start - self.prompt, keys)
        tokens = place + np.where(place < np.repeat(self.prompt, keys), of_prompt, of_completion)
        order = self.number.argsort(kind="stable")
        order = order[kept[order]]
        entry = np.zeros_like(keys)
        entry[order] = np.arange(len(order))
        # A prompt's tokens are in all of its rows, which are adjacent; other tokens are in one row.
        sharing = np.bincount(self.number, weights=kept).astype(np.int64)[self.number]
        begin = np.repeat(entry, queries)
        in_prompt = position < np.repeat(self.prompt, queries)
        end = begin + np.where(in_prompt, np.repeat(sharing, queries), 1)
        bounds = [np.concatenate([[0], n[kept].cumsum()]) for n in (queries, keys)]
        return [*bounds, tokens, starts[order], begin, end, position]


def _starts(counts: Numbers) -> Numbers:
    """Return each part's offset in a concatenation of parts with `counts` elements."""
    found: Numbers = counts.cumsum() - counts
    return found


def copy_bytes(whole: torch.Tensor, at: int, part: torch.Tensor) -> None:
    """Copy a CPU tensor into a CPU buffer of bytes, starting at byte `at`.

    This function uses numpy, because torch would wake all of its threads (see `row_of_each`).
    """
    values = np.ascontiguousarray(part.numpy())
    whole.numpy()[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)


def to_device(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Send tensors with 4-byte or 8-byte elements to a device in one asynchronous transfer."""
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    begins = [0, *accumulate(part.nbytes + (-part.nbytes) % 8 for part in parts)]
    whole = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    for part, at in zip(parts, begins, strict=False):
        copy_bytes(whole, at, part)
    over = whole.to(device, non_blocking=True)
    return [
        over[at : at + part.nbytes].view(part.dtype).view(part.shape)
        for part, at in zip(parts, begins, strict=False)
    ]


# Static buffers for CUDA graphs: a packed, padded micro-batch at fixed addresses.
#
# In every replay, a CUDA graph reads and writes the same addresses and processes the same number of
# tokens. Padding tokens form separate short rows. The model processes padding tokens like other
# tokens, so that every activation buffer is fully initialized. Padding tokens have zero gradient.
# Unused entries of the index tables describe empty rows, unused key positions, and trained tokens
# whose gradient is zero.


PADDING_ROW = 128
"""Maximum number of padding tokens in a row; every bucket allows rows of this length."""
ALIGNED = 256
"""Each index table starts at a multiple of `ALIGNED` bytes, as new torch tensors do."""


class Size(NamedTuple):
    """The size of a bucket: the largest micro-batch that fits into its buffers."""

    tokens: int
    places: int
    chosen: int
    rows: int
    longest_query: int
    longest_key: int

    @staticmethod
    def of(tables: PackedTables, longest: MaxLengths) -> Size:
        """Return the size of the bucket for a micro-batch.

        Counts that affect the run time are rounded up in small steps, and all other counts are
        rounded up in large steps.
        """
        tokens = padded_tokens(len(tables.input_ids))
        padding = tokens - len(tables.input_ids)
        return Size(
            tokens=tokens,
            places=round_up(len(tables.tokens) + padding, 8),
            chosen=padded_tokens(len(tables.chosen)),
            rows=power_of_two(len(tables.starts) + -(-padding // PADDING_ROW), 32),
            longest_query=power_of_two(longest.query, PADDING_ROW),
            longest_key=power_of_two(longest.key, PADDING_ROW),
        )

    def holds(self, other: Size) -> bool:
        return all(mine >= needed for mine, needed in zip(self, other, strict=True))

    def padded_to(self, tokens: int) -> Size:
        """Return the size after padding to `tokens` tokens.

        Padding tokens also need rows and key positions.
        """
        more = tokens - self.tokens
        return self._replace(
            tokens=tokens, places=self.places + more, rows=self.rows + -(-more // PADDING_ROW)
        )

    def with_room_for(self, other: Size) -> Size:
        """Return the smallest size that fits micro-batches of this size and of the size `other`."""
        return Size(*(max(pair) for pair in zip(self, other, strict=True)))


class StaticBuffers:
    """Device buffers at fixed addresses for one packed micro-batch."""

    def __init__(self, size: Size, device: torch.device, *, shared: bool = True) -> None:
        self.size = size
        self._shapes: list[tuple[int, int, torch.dtype]] = []
        total = 0
        for count, dtype in _lengths(size):
            self._shapes.append((total, count * dtype.itemsize, dtype))
            total += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        self._whole = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tables = PackedTables._make(
            self._whole[at : at + length].view(dtype) for at, length, dtype in self._shapes
        )
        longest = MaxLengths(size.longest_query, size.longest_key)
        self.packed: PackedBatch = packed_batch(self.tables, longest, shared=shared)

    def fill(self, tables: PackedTables) -> None:
        """Copy a micro-batch into the buffers in one asynchronous transfer."""
        pinned = self._whole.device.type == "cuda"
        host = torch.empty(len(self._whole), dtype=torch.uint8, pin_memory=pinned)
        host.numpy().fill(0)
        for (at, _, dtype), part in zip(self._shapes, padded(tables, self.size), strict=True):
            copy_bytes(host, at, part.to(dtype))
        self._whole.copy_(host, non_blocking=True)


def _lengths(size: Size) -> list[tuple[int, torch.dtype]]:
    """Return the length and dtype of each index table."""
    wide = [size.tokens, size.tokens, size.chosen, size.chosen, size.chosen]
    narrow = [size.rows + 1, size.rows + 1, size.places, size.rows, *[size.tokens] * 3]
    return [(n, torch.int64) for n in wide] + [(n, torch.int32) for n in narrow]


def padded(tables: PackedTables, size: Size) -> PackedTables:
    """Append rows of padding tokens to the index tables, up to the token count of `size`."""
    tokens, places, rows = len(tables.input_ids), len(tables.tokens), len(tables.starts)
    number = torch.arange(size.tokens - tokens)
    entry, behind = number // PADDING_ROW + rows, number % PADDING_ROW
    starts = number[::PADDING_ROW]
    unused = torch.full((size.rows - rows - len(starts),), len(number))
    ends = torch.cat([(starts + PADDING_ROW).clamp(max=len(number)), unused])
    return tables._replace(
        input_ids=torch.cat([tables.input_ids, torch.zeros_like(number)]),
        position_ids=torch.cat([tables.position_ids, behind]),
        query_starts=torch.cat([tables.query_starts, tokens + ends]),
        key_starts=torch.cat([tables.key_starts, places + ends]),
        tokens=torch.cat([tables.tokens, tokens + number]),
        starts=torch.cat([tables.starts, places + starts]),
        begin=torch.cat([tables.begin, entry]),
        end=torch.cat([tables.end, entry + 1]),
        position=torch.cat([tables.position, behind]),
    )
