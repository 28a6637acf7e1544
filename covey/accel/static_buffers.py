"""Static buffers for CUDA graphs: a packed, padded micro-batch at fixed addresses.

In every replay, a CUDA graph reads and writes the same addresses and processes the same number of
tokens. Padding tokens form separate short rows. The model processes padding tokens like other
tokens, so that every activation buffer is fully initialized. Padding tokens have zero gradient.
Unused entries of the index tables describe empty rows, unused key positions, and trained tokens
whose gradient is zero.

The dimensions in tensor shapes are N (packed tokens), R (key positions) and M (trained tokens).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from covey.accel.packing import MaxLengths, PackedBatch, PackedTables, copy_bytes, packed_batch
from covey.accel.sizes import padded_tokens, power_of_two, round_up

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
        """Return whether a micro-batch of size `other` fits into this size."""
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
        """Allocate the buffers; `shared` says whether rows may share a prompt."""
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
