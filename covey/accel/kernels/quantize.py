"""Row-wise quantization to float8 (e4m3), fused with the operation that makes the values.

A row x is stored as q = round(x / s) in float8, with one float32 scale s = max |x| / 448 per row.
For activations a row is a token, and for weights a row is an output of the layer. All arithmetic is
float32, and the float8 number is rounded once.

Tensor shapes use N rows of D numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
"""The largest float8 number, 448."""
LEAST = 1e-30
"""The least maximum of a row, so that a row of zeros has a positive scale."""
BLOCK = 4096
"""Numbers that a Triton program processes at once."""


class Quantized(NamedTuple):
    """A matrix of float8 numbers, with one scale per row."""

    values: torch.Tensor
    """[N, D] float8: the rounded quotients of the numbers and their row's scale."""
    scales: torch.Tensor
    """[N, 1] float32."""

    @staticmethod
    def empty(count: int, size: int, device: torch.device) -> Quantized:
        """Return uninitialized memory for N rows of D numbers."""
        values = torch.empty(count, size, dtype=FLOAT8, device=device)
        return Quantized(values, torch.empty(count, 1, device=device))

    def dequantized(self) -> torch.Tensor:
        """Return the float32 numbers that the matrix stands for."""
        return self.values.float() * self.scales


@triton.jit
def _factor(largest, top: tl.constexpr, least: tl.constexpr):
    """Return the factor of a row's numbers, and the row's scale, from its maximum."""
    largest = tl.maximum(largest, least)
    return top / largest, largest / top


@triton.jit
def _rows(
    values, result, scales, stride, count, size,
    rows: tl.constexpr, block: tl.constexpr, top: tl.constexpr, least: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    real = (row < count)[:, None]
    largest = tl.zeros((rows, block), tl.float32)
    for start in range(0, size, block):
        column = start + tl.arange(0, block)[None, :]
        at = values + row[:, None] * stride + column
        x = tl.load(at, mask=real & (column < size), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    factor, scale = _factor(tl.max(largest, axis=1), top, least)
    tl.store(scales + row, scale, mask=row < count)
    # The second read comes from the L1 cache.
    for start in range(0, size, block):
        column = start + tl.arange(0, block)[None, :]
        at = values + row[:, None] * stride + column
        x = tl.load(at, mask=real & (column < size), other=0.0).to(tl.float32)
        small = (x * factor[:, None]).to(result.dtype.element_ty)
        tl.store(result + row[:, None] * size + column, small, mask=real & (column < size))


@triton.jit
def _add_norm(
    hidden, delta, gain, result, scales, size, eps,
    block: tl.constexpr, adds: tl.constexpr, top: tl.constexpr, least: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    at = row * size + column
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + at, x, mask=inside)
    weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)) * weight
    factor, scale = _factor(tl.max(tl.abs(normed), axis=0), top, least)
    tl.store(scales + row, scale)
    small = (normed * factor).to(result.dtype.element_ty)
    tl.store(result + at, small, mask=inside)


@triton.jit
def _silu_mul(
    gate, up, result, scales, gate_stride, up_stride, size,
    block: tl.constexpr, top: tl.constexpr, least: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((block,), tl.float32)
    for start in range(0, size, block):
        column = start + tl.arange(0, block)
        inside = column < size
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(g * tl.sigmoid(g) * u))
    factor, scale = _factor(tl.max(largest, axis=0), top, least)
    tl.store(scales + row, scale)
    for start in range(0, size, block):
        column = start + tl.arange(0, block)
        inside = column < size
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        small = (g * tl.sigmoid(g) * u * factor).to(result.dtype.element_ty)
        tl.store(result + row * size + column, small, mask=inside)


def _tile(size: int) -> tuple[int, int]:
    """Return numbers per iteration and warps of a Triton program for rows of the given size."""
    block = min(BLOCK, triton.next_power_of_2(size))
    return block, 8 if block > 1024 else 4


def quantize_rows(values: torch.Tensor, out: Quantized | None = None) -> Quantized:
    """Quantize each row of `values` [N, D], into `out` if given."""
    count, size = values.shape
    out = Quantized.empty(count, size, values.device) if out is None else out
    block, warps = _tile(size)
    rows = max(1, BLOCK // block)
    _rows[(triton.cdiv(count, rows),)](
        values, *out, values.stride(0), count, size, rows=rows, block=block, top=LARGEST,
        least=LEAST, num_warps=8 if rows > 1 else warps,
    )  # fmt: skip
    return out


def add_norm_quantized(
    hidden: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float
) -> Quantized:
    """Add `delta` to `hidden` [N, D] in place, and return the RMSNorm of the sum, quantized."""
    count, size = hidden.shape
    out = Quantized.empty(count, size, hidden.device)
    block = triton.next_power_of_2(size)
    _add_norm[(count,)](
        hidden, hidden if delta is None else delta, gain, *out, size, eps,
        block=block, adds=delta is not None, top=LARGEST, least=LEAST,
        num_warps=8 if block > 1024 else 4,
    )  # fmt: skip
    return out


def silu_mul_quantized(gate: torch.Tensor, up: torch.Tensor) -> Quantized:
    """Return silu(gate) * up [N, D], quantized."""
    count, size = gate.shape
    out = Quantized.empty(count, size, gate.device)
    block, warps = _tile(size)
    _silu_mul[(count,)](
        gate, up, *out, gate.stride(0), up.stride(0), size,
        block=block, top=LARGEST, least=LEAST, num_warps=warps,
    )  # fmt: skip
    return out
