"""Room for the layout of a micro-batch that never moves, padded to a size that many fit into.

What is recorded in a graph reads and writes the same addresses, as many tokens every time. Padding
tokens are short rows of their own: they are computed like any others, so nothing is ever left
uninitialised, and nobody asks for their gradient. What is not used of the other tables is rows
without tokens, places that no row reads, and trained tokens whose gradient is zero.

Shapes: N packed tokens, R places of keys, M trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from covey.accel.packing import MaxLengths, PackedBatch, PackedTables, packed_rows

DUMMY = 128
"""Padding tokens in a row of them; no bucket's longest row is shorter."""
STEP = 256
"""Numbers of tokens are multiples of it."""
ALIGNED = 256
"""Bytes: where each table begins, so that kernels find them as they find fresh tensors."""


class Size(NamedTuple):
    """How much of everything there is room for."""

    tokens: int
    places: int
    chosen: int
    rows: int
    longest_query: int
    longest_key: int

    @staticmethod
    def of(tables: PackedTables, longest: MaxLengths) -> Size:
        """Return the bucket of a layout: what costs time is rounded little, all else much."""
        tokens = bucket(len(tables.input_ids))
        padding = tokens - len(tables.input_ids)
        return Size(
            tokens=tokens,
            places=_stepped(len(tables.tokens) + padding, 8),
            chosen=bucket(len(tables.chosen)),
            rows=_doubled(len(tables.starts) + -(-padding // DUMMY), 32),
            longest_query=_doubled(longest.query, DUMMY),
            longest_key=_doubled(longest.key, DUMMY),
        )

    def holds(self, other: Size) -> bool:
        """Tell whether there is room for all of another."""
        return all(mine >= needed for mine, needed in zip(self, other, strict=True))

    def padded_to(self, tokens: int) -> Size:
        """Return what the same takes with more padding, which needs rows and places as well."""
        more = tokens - self.tokens
        return self._replace(
            tokens=tokens, places=self.places + more, rows=self.rows + -(-more // DUMMY)
        )

    def with_room_for(self, other: Size) -> Size:
        """Return a size that holds both."""
        return Size(*(max(pair) for pair in zip(self, other, strict=True)))


def bucket(count: int) -> int:
    """Round a number of tokens up to one that graphs are recorded for, by a sixteenth at most."""
    return _stepped(count, 16)


def _stepped(count: int, steps: int) -> int:
    """Round up to one of `steps` numbers between a power of two and the next."""
    step = max(STEP, _doubled(count, 2) // 2 // steps)
    return max(1, -(-count // step)) * step


def _doubled(count: int, least: int) -> int:
    """Round up to a power of two."""
    return max(least, 1 << max(0, count - 1).bit_length())


class StaticRows:
    """A layout on a device, in memory that stays where it is."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self._shapes: list[tuple[int, int, torch.dtype]] = []
        total = 0
        for count, dtype in _lengths(size):
            self._shapes.append((total, count * dtype.itemsize, dtype))
            total += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        self._whole = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tables = self._tables(self._whole)
        longest = MaxLengths(size.longest_query, size.longest_key)
        self.packed: PackedBatch = packed_rows(self.tables, longest, shared=True)

    def fill(self, tables: PackedTables) -> None:
        """Write a layout that fits, in one piece and without waiting for the device."""
        pinned = self._whole.device.type == "cuda"
        host = torch.zeros(len(self._whole), dtype=torch.uint8, pin_memory=pinned)
        for view, part in zip(self._tables(host), padded(tables, self.size), strict=True):
            view[: len(part)] = part
        self._whole.copy_(host, non_blocking=True)

    def _tables(self, whole: torch.Tensor) -> PackedTables:
        return PackedTables._make(whole[at : at + n].view(dtype) for at, n, dtype in self._shapes)


def _lengths(size: Size) -> list[tuple[int, torch.dtype]]:
    """Return length and type of each of the tables."""
    wide = [size.tokens, size.tokens, size.chosen, size.chosen, size.chosen]
    narrow = [size.rows + 1, size.rows + 1, size.places, size.rows, *[size.tokens] * 3]
    return [(n, torch.int64) for n in wide] + [(n, torch.int32) for n in narrow]


def padded(tables: PackedTables, size: Size) -> PackedTables:
    """Return the tables with rows of padding tokens; what is missing behind them is zero."""
    tokens, places, rows = len(tables.input_ids), len(tables.tokens), len(tables.starts)
    number = torch.arange(size.tokens - tokens)
    entry, behind = number // DUMMY + rows, number % DUMMY
    starts = number[::DUMMY]
    unused = torch.full((size.rows - rows - len(starts),), len(number))
    ends = torch.cat([(starts + DUMMY).clamp(max=len(number)), unused])
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
