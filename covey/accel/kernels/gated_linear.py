"""The MLP's gate and up projections, fused with SwiGLU into one kernel for few tokens.

In a decode step of a small model, a separate SwiGLU kernel takes as long as the matrix product,
because the SwiGLU kernel reads `gate` and `up` from memory. In this kernel, one Triton program
computes matching columns of `gate` and `up`, so that `gate` and `up` need not be stored. The kernel
still rounds `gate` and `up` to the weight's dtype, as if it wrote them to memory.

The dimensions in tensor shapes are N (tokens), D (hidden size) and M (MLP size).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from covey.accel.kernels.launch import early_start

MOST_WEIGHTS = 4 * 2**20
"""Maximum number of weights at which this kernel is faster than a library's matrix product followed
by a SwiGLU kernel. On an H200 with D = 576 and M = 1,536, this kernel took 4.9 to 9.4 microseconds,
and the two separate kernels took 6.0 to 11.4 microseconds. With D = 1,536 and M = 8,960, this
kernel took 25 microseconds, and the two separate kernels took 22 microseconds."""
FEW_TOKENS = 128
FEW_EXACT = 16
"""Maximum number of tokens for this kernel in float32, which only parity checks use. The compiler
unrolls float32 products, so only small tiles compile quickly."""


class Tile(NamedTuple):
    """Size of the output tile that a Triton program computes, and launch settings."""

    rows: int
    columns: int
    block: int
    """Inputs per iteration."""
    warps: int
    stages: int


def tile_for(tokens: int, dtype: torch.dtype) -> Tile:
    """Return the tile that was the fastest on an H200."""
    if dtype == torch.float32:
        return Tile(16, 16, 32, 4, 2)
    return Tile(64, 32, 64, 4, 4) if tokens <= FEW_TOKENS else Tile(64, 64, 64, 4, 3)


def fuses_swiglu(tokens: int, weight: torch.Tensor) -> bool:
    """Return whether this kernel is the fastest for `tokens` tokens and a weight [2 M, D]."""
    few = tokens <= FEW_EXACT or weight.dtype != torch.float32
    return few and weight.numel() <= MOST_WEIGHTS


@triton.jit
def _gated_linear(
    values, weight, bias, product, count, width,
    size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
    biased: tl.constexpr, early: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    # Programs of the same columns are neighbours, so that each weight is read from memory once.
    tall = tl.cdiv(count, rows)
    row = (tl.program_id(0) % tall) * rows + tl.arange(0, rows)
    column = tl.program_id(0) // tall * columns + tl.arange(0, columns)
    real, kept = row < count, column < width
    # Rows and columns past the end read row and column 0. The results use the original indices,
    # because the compiler would not see that the replaced indices are consecutive.
    line = tl.where(real, row, 0).to(tl.int64) * size
    cells = tl.where(kept, column, 0).to(tl.int64) * size
    gate = tl.zeros((rows, columns), tl.float32)
    up = tl.zeros((rows, columns), tl.float32)
    for start in range(0, size, block):
        at = start + tl.arange(0, block)
        inside = at < size if size % block else tl.full((block,), True, tl.int1)
        left = tl.load(values + line[:, None] + at[None, :], mask=inside[None, :], other=0.0)
        place = weight + cells[None, :] + at[:, None]
        right = tl.load(place, mask=inside[:, None], other=0.0)
        gate = tl.dot(left, right, gate, input_precision=precision)
        right = tl.load(place + width * size, mask=inside[:, None], other=0.0)
        up = tl.dot(left, right, up, input_precision=precision)
    if biased:
        gate += tl.load(bias + column, mask=kept).to(tl.float32)[None, :]
        up += tl.load(bias + width + column, mask=kept).to(tl.float32)[None, :]
    kind = weight.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    out = product + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out, gate * tl.sigmoid(gate) * up, mask=real[:, None] & kept[None, :])


def gated_linear(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return silu(gate) * up [N, M], where gate and up are the halves of W x + b [N, 2 M]."""
    (count, size), width = values.shape, len(weight) // 2
    tile = tile_for(count, weight.dtype)
    product = values.new_empty(count, width)
    _gated_linear[(triton.cdiv(count, tile.rows) * triton.cdiv(width, tile.columns),)](
        values, weight, weight if bias is None else bias, product, count, width,
        size=size, rows=tile.rows, columns=tile.columns, block=tile.block,
        biased=bias is not None, precision="ieee" if weight.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **early_start(values.device),
    )  # fmt: skip
    return product
