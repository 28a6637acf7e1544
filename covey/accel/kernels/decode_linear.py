"""Linear layers of a decode step, fused with the norm before them and the addition after them.

With one token per slot, a matrix product takes a few microseconds, and so does every kernel between
two products. One kernel therefore computes a product together with what comes before or after it:

- the RMSNorm of the residual stream, whose rows the product reads;
- SwiGLU of the two halves of the product;
- the addition of the product to the residual stream.

The norm needs the sum of squares of each row. The kernel that adds to the residual stream also
writes this sum, in one part per tile of columns, so that nobody reads the row a second time. All
results are rounded exactly where the fused forward pass of the trainer rounds them.

Tensor shapes use W occupied slots, hidden size D, N outputs and P parts of the sum of squares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from covey.accel.kernels.early_start import starts_early


class Tile(NamedTuple):
    """The part of a product that a Triton program computes, and how it does so."""

    rows: int
    columns: int
    block: int
    """Inputs per iteration."""
    warps: int
    stages: int
    splits: int = 1
    """Parts of the inputs, each computed by a program of its own."""
    early: int = 0
    """How early the next kernel may start (programmatic dependent launch): 0 after this one, 1 when
    all programs have computed their products, 2 when all programs have started, 3 likewise, and
    this kernel fetches weights before the last one has ended.
    """


class Residual(NamedTuple):
    """The residual stream of all slots, and the sums of squares of its rows."""

    hidden: torch.Tensor
    """[W, D] float32."""
    squares: torch.Tensor
    """[W, P] float32: parts of the sum of squares of each row."""


class Norm(NamedTuple):
    """Gain [D] and epsilon of a RMSNorm."""

    gain: torch.Tensor
    eps: float


@triton.jit
def _fetch(
    weight, column, first, width, size: tl.constexpr, fetched: tl.constexpr, gated: tl.constexpr
):
    """Fetch the first lines, of 128 bytes each, of some rows of a weight into the L2 cache."""
    line = tl.minimum(first + tl.arange(0, fetched) * 64, size - 64)
    address = (weight + column[:, None] * size + line[None, :]).to(tl.int64)
    for half in tl.static_range(2 if gated else 1):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address + half * width * size * 2],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _begin(
    weight, column, first, width, size: tl.constexpr, early: tl.constexpr, fetched: tl.constexpr,
    gated: tl.constexpr,
):  # fmt: skip
    """Wait for the kernel before this one, after what does not need its results."""
    if early > 1:
        gdc_launch_dependents()
    if fetched > 0:
        _fetch(weight, column, first, width, size, fetched, gated)
    gdc_wait()


@triton.jit
def _row_scales(squares, row, parts, eps, size: tl.constexpr, most_parts: tl.constexpr):
    """Return the factor by which a norm scales each row."""
    part = tl.arange(0, most_parts)
    cells = squares + row[:, None] * parts + part[None, :]
    sums = tl.load(cells, mask=(part < parts)[None, :], other=0.0)
    return 1.0 / tl.sqrt(tl.sum(sums, axis=1) / size + eps)


@triton.jit
def _products(
    values, gain, scale, weight, row, column, first, width, size: tl.constexpr,
    reach: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
    norms: tl.constexpr, gated: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Multiply rows of values with rows of a weight; if `gated`, with two sets of rows."""
    total = tl.zeros((rows, columns), tl.float32)
    second = tl.zeros((rows, columns), tl.float32)
    for start in range(first, tl.minimum(first + reach, size), block):
        at = start + tl.arange(0, block)
        inside = at < size if size % block else tl.full((block,), True, tl.int1)
        left = tl.load(values + row[:, None] * size + at[None, :], mask=inside[None, :], other=0.0)
        if norms:
            gains = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
            left = (left * scale[:, None] * gains[None, :]).to(weight.dtype.element_ty)
        cells = weight + column[None, :] * size + at[:, None]
        right = tl.load(cells, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
        if gated:
            right = tl.load(cells + width * size, mask=inside[:, None], other=0.0)
            second = tl.dot(left, right, second, input_precision=precision)
    return total, second


@triton.jit(do_not_specialize=["count", "parts"])
def _linear(
    values, gain, squares, weight, bias, out, count, eps, width, parts,
    size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
    most_parts: tl.constexpr, norms: tl.constexpr, gated: tl.constexpr, adds: tl.constexpr,
    biased: tl.constexpr, splits: tl.constexpr, early: tl.constexpr, fetched: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns are neighbours, so that each weight is read from memory once.
    tall = tl.cdiv(count, rows)
    to_row = (tl.program_id(0) % tall) * rows + tl.arange(0, rows)
    part = tl.program_id(0) // tall
    to_column = part * columns + tl.arange(0, columns)
    real, kept = to_row < count, to_column < width
    # Rows and columns past the end read those at 0. They would make the compiler lose sight of
    # consecutive addresses, so that what is stored has indices of its own.
    row, column = tl.where(real, to_row, 0), tl.where(kept, to_column, 0).to(tl.int64)
    reach: tl.constexpr = (size + block * splits - 1) // (block * splits) * block
    first = tl.program_id(1) * reach
    if early > 0:
        _begin(weight, column, first, width, size, early, fetched, gated)
    scale = real
    if norms:
        scale = _row_scales(squares, row, parts, eps, size, most_parts)
    total, second = _products(
        values, gain, scale, weight, row, column, first, width, size,
        reach, rows, columns, block, norms, gated, precision,
    )  # fmt: skip
    if early == 1:
        gdc_launch_dependents()
    kind = weight.dtype.element_ty
    if biased:
        total += tl.load(bias + to_column, mask=kept).to(tl.float32)[None, :]
        if gated:
            second += tl.load(bias + width + to_column, mask=kept).to(tl.float32)[None, :]
    if splits == 1:
        total = total.to(kind).to(tl.float32)
    if gated:
        total = total * tl.sigmoid(total) * second.to(kind).to(tl.float32)
    place = out + (tl.program_id(1) * count + to_row)[:, None] * width + to_column[None, :]
    stored = real[:, None] & kept[None, :]
    if adds:
        total = tl.where(stored, total + tl.load(place, mask=stored), 0.0)
        tl.store(squares + to_row * parts + part, tl.sum(total * total, axis=1), mask=real)
    tl.store(place, total, mask=stored)


FETCHED = 16
"""The most lines of 128 bytes per column that a program fetches before it may start."""


def _run(
    values: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    squares: torch.Tensor | None = None,
    **options: Any,
) -> None:
    (count, size), width = values.shape, out.shape[-1]
    gain, eps = (weight, 0.0) if norm is None else norm
    parts = 1 if squares is None else squares.shape[1]
    exact = weight.dtype == torch.float32
    early = tile.early if starts_early(values.device) else 0
    lines = size // 64 if early == 3 and not exact and size % 64 == 0 else 0
    programs = triton.cdiv(count, tile.rows) * triton.cdiv(width, tile.columns)
    _linear[(programs, tile.splits)](
        values, gain, out if squares is None else squares, weight,
        weight if bias is None else bias, out, count, eps, width, parts,
        size=size, rows=tile.rows, columns=tile.columns, block=tile.block,
        most_parts=max(64, triton.next_power_of_2(parts)), norms=norm is not None,
        biased=bias is not None, splits=tile.splits, early=early,
        fetched=min(FETCHED, triton.next_power_of_2(lines)) if lines else 0,
        precision="ieee" if exact else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if early else {}),
        **options,
    )  # fmt: skip


def norm_linear(
    residual: Residual,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Return W norm(hidden) + b [W, N]; if `gated`, silu of its first half times its second."""
    width = len(weight) // 2 if gated else len(weight)
    out = weight.new_empty(len(residual.hidden), width)
    _run(
        residual.hidden, weight, out, tile, bias=bias, norm=norm, squares=residual.squares,
        gated=gated, adds=False,
    )  # fmt: skip
    return out


def gated_linear(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """Return silu(gate) * up [W, N]; gate and up are the halves of W x + b."""
    out = values.new_empty(len(values), len(weight) // 2)
    _run(values, weight, out, tile, bias=bias, gated=True, adds=False)
    return out


def add_linear(
    hidden: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
) -> Residual:
    """Add W x + b [W, D] to `hidden` in place; return it with its sums of squares."""
    squares = hidden.new_empty(len(hidden), triton.cdiv(len(weight), tile.columns))
    _run(values, weight, hidden, tile, bias=bias, squares=squares, gated=False, adds=True)
    return Residual(hidden, squares)


def split_linear(values: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return W x in float32 in `tile.splits` addends [splits, W, N]."""
    out = values.new_empty(tile.splits, len(values), len(weight), dtype=torch.float32)
    _run(values, weight, out, tile, gated=False, adds=False)
    return out


@triton.jit
def _embed(tokens, table, hidden, squares, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    token = tl.load(tokens + row)
    values = tl.load(table + token * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + row * size + column, values, mask=inside)
    tl.store(squares + row, tl.sum(values * values, axis=0))


def embed(tokens: torch.Tensor, table: torch.Tensor) -> Residual:
    """Return the embeddings of tokens [W] as a new residual stream."""
    size = table.shape[1]
    hidden = table.new_empty(len(tokens), size, dtype=torch.float32)
    squares = hidden.new_empty(len(tokens), 1)
    _embed[(len(tokens),)](
        tokens, table, hidden, squares, size=size, block=triton.next_power_of_2(size)
    )
    return Residual(hidden, squares)
