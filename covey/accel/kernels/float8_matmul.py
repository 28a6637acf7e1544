"""Matrix product of float8 matrices with row-wise scales, for few rows.

With the few rows of a decode step, the product takes as long as reading the weight. Libraries give
each multiprocessor whole tiles of the result, so that most of them wait. Here the steps along the
inner dimension of all tiles are split evenly among the Triton programs (stream-K). If several
programs share a tile, each stores a partial sum, and the last one adds them in a fixed order.

Tensor shapes use M rows, N columns and inner dimension D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from covey.accel.kernels.quantize import Quantized

PARTIAL_SUMS = 2 * 264 * 128 * 256
"""Room for two tiles of partial sums per Triton program."""
TILES = 2**14
"""The largest number of tiles of a split product."""


class Tile(NamedTuple):
    """Sizes of a Triton program."""

    rows: int
    columns: int
    inner: int
    programs: int
    warps: int
    stages: int


@triton.jit
def _write(sums, row_scales, column_scales, bias, out, row, column, rows, columns, biased):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    left = tl.load(row_scales + row, mask=row < rows, other=0.0)
    right = tl.load(column_scales + column, mask=column < columns, other=0.0)
    result = sums * left[:, None] * right[None, :]
    if biased:
        result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "steps", "tiles", "share"])
def _product(
    left, right, row_scales, column_scales, bias, out, partial, arrived,
    rows, columns, steps, tiles, share,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_inner: tl.constexpr,
    biased: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program * share
    end = tl.minimum(at + share, tiles * steps)
    first = at // steps
    row_tiles = tl.cdiv(rows, block_rows)
    cell = tl.arange(0, block_rows)[:, None] * block_columns + tl.arange(0, block_columns)[None, :]
    while at < end:
        tile = at // steps
        begin = at - tile * steps
        stop = tl.minimum(steps, begin + end - at)
        # Tiles that read the same weight are neighbours, so that memory is read once.
        row_at = (tile % row_tiles) * block_rows
        column_at = (tile // row_tiles) * block_columns
        sums = tl.zeros((block_rows, block_columns), tl.float32)
        for step in range(begin, stop):
            x = left.load([row_at, step * block_inner])
            y = right.load([column_at, step * block_inner])
            sums = tl.dot(x, y.T, sums)
        row = row_at + tl.arange(0, block_rows)
        column = column_at + tl.arange(0, block_columns)
        if stop - begin == steps:
            _write(
                sums, row_scales, column_scales, bias, out, row, column, rows, columns, biased
            )  # fmt: skip
        else:
            # A program shares at most two tiles: its first one and its last one.
            mine = (2 * program + (tile != first)).to(tl.int64)
            tl.store(partial + mine * block_rows * block_columns + cell, sums)
            tl.debug_barrier()
            earliest = (tile * steps) // share
            latest = (tile * steps + steps - 1) // share
            others = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
            if others == latest - earliest:
                tl.store(arrived + tile, 0)  # for the next call
                sums = tl.zeros((block_rows, block_columns), tl.float32)
                for one in range(earliest, latest + 1):
                    theirs = (2 * one + (tile != (one * share) // steps)).to(tl.int64)
                    sums += tl.load(
                        partial + theirs * block_rows * block_columns + cell, cache_modifier=".cg"
                    )
                _write(
                    sums, row_scales, column_scales, bias, out, row, column, rows, columns, biased
                )  # fmt: skip
        at += stop - begin


class Workspace:
    """Memory for partial sums, which the products of one decoder use in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial sums, and for every tile of a result the number of sums that have arrived."""
        if self._memory is None:
            sums = torch.empty(PARTIAL_SUMS, device=self.device)
            self._memory = sums, torch.zeros(TILES, dtype=torch.int32, device=self.device)
        return self._memory


def float8_linear(
    left: Quantized, right: Quantized, bias: torch.Tensor | None, workspace: Workspace
) -> torch.Tensor:
    """Return left @ right^T + bias [M, N] in bfloat16; `left` is [M, D] and `right` [N, D]."""
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scales,
        scale_b=right.scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def split_matmul(
    left: Quantized,
    right: Quantized,
    bias: torch.Tensor | None,
    tile: Tile,
    workspace: Workspace,
) -> torch.Tensor:
    """Return left @ right^T + bias [M, N] in bfloat16, with the inner dimension split."""
    rows, inner = left.values.shape
    columns = len(right.values)
    steps = triton.cdiv(inner, tile.inner)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    share = triton.cdiv(tiles * steps, min(tile.programs, tiles * steps))
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=left.values.device)
    _product[(triton.cdiv(tiles * steps, share),)](
        TensorDescriptor.from_tensor(left.values, [tile.rows, tile.inner]),
        TensorDescriptor.from_tensor(right.values, [tile.columns, tile.inner]),
        left.scales, right.scales, out if bias is None else bias, out, *workspace.memory,
        rows, columns, steps, tiles, share,
        block_rows=tile.rows, block_columns=tile.columns, block_inner=tile.inner,
        biased=bias is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
