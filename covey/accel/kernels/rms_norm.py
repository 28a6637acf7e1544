"""Residual addition fused with RMSNorm: forward and backward kernels.

The residual stream is float32, and the output of RMSNorm has the dtype of the next matrix product.
The kernel computes in float32 and rounds its result once.

A Triton program processes several rows, so that all threads have work even if rows are short. The
dimensions in tensor shapes are N (tokens) and D (hidden size).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from covey.accel.fused_parameters import GradSink, sink_of
from covey.accel.kernels.launch import call, early_start

PROGRAMS = 512
"""Maximum number of Triton programs in the backward pass. Each program sums the gradient of `gain`
(the norm's weight) over some of the rows."""
SHORT, MORE = 1024, 4
"""For hidden sizes of at most `SHORT`, the number of programs is multiplied by `MORE`, because each
program takes little time."""
TILE = 2048
"""The number of elements that a Triton program processes at once."""
COLUMNS = 16
"""Number of columns of the gain's gradient that one Triton program adds up."""


@triton.jit
def _forward(
    hidden, delta, gain, total, normed, scales, count, eps,
    size: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    inside = (row < count)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    values = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        values += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, values, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / size + eps)
    tl.store(scales + row, scale, mask=row < count)
    weight = tl.load(gain + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(normed + at, values * scale[:, None] * weight[None, :], mask=inside)


@triton.jit
def _backward(
    normed_grad, total_grad, total, gain, scales, hidden_grad, delta_grad, gain_grad, count,
    size: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, goes_on: tl.constexpr,
    adds: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block)
    weight = tl.load(gain + column, mask=column < size, other=0.0).to(tl.float32)
    gain_sum = tl.zeros((block,), tl.float32)
    for start in range(tl.program_id(0) * rows, count, tl.num_programs(0) * rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)
        inside = (row < count)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        scale = tl.load(scales + row, mask=row < count, other=0.0)[:, None]
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
        gain_sum += tl.sum(grad * unit, axis=0)
        grad = grad * weight[None, :]
        along = tl.sum(grad * unit, axis=1) / size
        result = scale * (grad - unit * along[:, None])
        if goes_on:
            result += tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden_grad + at, result, mask=inside)
        if adds:
            tl.store(delta_grad + at, result, mask=inside)
    tl.store(gain_grad + tl.program_id(0) * size + column, gain_sum, mask=column < size)


@triton.jit
def _add_up(
    parts, total, count, size, adds: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    """Write the sum of `count` rows to `total`, or add the sum to `total` if `adds` is true."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    sums = tl.zeros((rows, columns), tl.float32)
    for start in range(0, count, rows):
        row = start + tl.arange(0, rows)
        inside = (row < count)[:, None] & (column < size)[None, :]
        sums += tl.load(parts + row[:, None] * size + column[None, :], mask=inside, other=0.0)
    result = tl.sum(sums, axis=0)
    if adds:
        result += tl.load(total + column, mask=column < size, other=0.0)
    tl.store(total + column, result, mask=column < size)


class _Tiles(NamedTuple):
    rows: int
    block: int
    warps: int

    @staticmethod
    def of(size: int) -> _Tiles:
        block = triton.next_power_of_2(size)
        return _Tiles(max(1, TILE // block), block, 4 if block <= 4096 else 8)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, size = hidden.shape
        tiles = _Tiles.of(size)
        total = hidden if delta is None else torch.empty_like(hidden)
        normed = torch.empty_like(hidden, dtype=dtype)
        scales = hidden.new_empty(count, dtype=torch.float32)
        _forward[(triton.cdiv(count, tiles.rows),)](
            hidden,
            hidden if delta is None else delta,
            gain, total, normed, scales, count, eps,
            size=size, rows=tiles.rows, block=tiles.block, adds=delta is not None, early=False,
            num_warps=tiles.warps,
        )  # fmt: skip
        ctx.save_for_backward(total, gain, scales)
        ctx.adds = None if delta is None else delta.dtype
        ctx.sink = sink_of([gain])
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        total_grad, normed_grad = grads
        total, gain, scales = ctx.saved_tensors
        if normed_grad is None:  # the norm was not used
            delta_grad = None if ctx.adds is None or total_grad is None else total_grad.to(ctx.adds)
            return total_grad, delta_grad, None, None, None
        count, size = total.shape
        tiles = _Tiles.of(size)
        most = PROGRAMS * (MORE if size <= SHORT else 1)
        programs = min(most, triton.cdiv(count, tiles.rows))
        hidden_grad = torch.empty_like(total)
        delta_grad = None if ctx.adds is None else torch.empty_like(total, dtype=ctx.adds)
        gain_grad = total.new_empty(programs, size, dtype=torch.float32)
        normed_grad = normed_grad.contiguous()
        _backward[(programs,)](
            normed_grad,
            normed_grad if total_grad is None else total_grad.contiguous(),
            total, gain, scales, hidden_grad,
            hidden_grad if delta_grad is None else delta_grad,
            gain_grad, count,
            size=size, rows=tiles.rows, block=tiles.block, goes_on=total_grad is not None,
            adds=delta_grad is not None, num_warps=tiles.warps,
        )  # fmt: skip
        found = _gain_grad(gain, gain_grad, ctx.sink) if ctx.needs_input_grad[2] else None
        return hidden_grad, delta_grad, found, None, None


def _gain_grad(
    gain: torch.Tensor, parts: torch.Tensor, sink: GradSink | None
) -> torch.Tensor | None:
    """Return the gradient of `gain`, which is the sum of the rows of `parts`.

    If `sink` is given, add the sum to the gradient in `sink` and return None.
    """
    count, size = parts.shape
    former = None if sink is None else sink.total
    total = former
    if total is None:
        total = parts.new_empty(size) if sink is None else sink.start()
    _add_up[(triton.cdiv(size, COLUMNS),)](
        parts, total, count, size, adds=former is not None,
        rows=min(PROGRAMS, triton.next_power_of_2(count)), columns=COLUMNS,
    )  # fmt: skip
    return total.to(gain.dtype) if sink is None else None


def norm(
    hidden: torch.Tensor, gain: torch.Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return RMSNorm(hidden) * gain [N, D]; the default `dtype` is the dtype of `gain`."""
    normed: torch.Tensor
    _, normed = call(_AddNorm, hidden.contiguous(), None, gain, eps, dtype or gain.dtype)
    return normed


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum hidden + delta [N, D], and RMSNorm(sum) * gain.

    Without `delta`, the sum is `hidden`. In the backward pass, one kernel combines the gradient of
    the sum with the gradient of the RMSNorm.
    """
    total: torch.Tensor
    normed: torch.Tensor
    delta = None if delta is None else delta.contiguous()
    total, normed = call(_AddNorm, hidden.contiguous(), delta, gain, eps, gain.dtype)
    return total, normed


def add_norm_in_place(
    hidden: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `hidden` [N, D] in place, and return the RMSNorm of the sum.

    The function records nothing for autograd. The function is meant for few tokens, because it
    starts a Triton program for each token.
    """
    count, size = hidden.shape
    normed = torch.empty_like(hidden, dtype=gain.dtype)
    tiles = _Tiles.of(size)
    _forward[(count,)](
        hidden, hidden if delta is None else delta, gain, hidden, normed, hidden.new_empty(count),
        count, eps, size=size, rows=1, block=tiles.block, adds=delta is not None,
        num_warps=tiles.warps, **early_start(hidden.device),
    )  # fmt: skip
    return normed
