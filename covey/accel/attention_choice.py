"""Chooses the kernels for attention over packed rows, by measurement on the device.

Which kernels are fastest depends on the device, the heads and the length of rows. All kernels are
measured once per process for each class of shapes: forward and backward pass over rows of one
length. A kernel that fails, or whose results differ from flash attention 2, is not used. With
torch's deterministic algorithms, only flash attention 2 is used.

A CUDA graph launches kernels without the time that Python and the library need to prepare them. So
each class has two choices, one for passes that are captured and one for others.

Tensor shapes use N packed tokens, R key positions, H heads, K key-value heads and head size D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from covey.accel.attention_kernels import FLASH, KERNELS
from covey.accel.varlen_attention import VarlenRows

LONG = 1024
"""The shortest rows for which kernels are measured; attention of shorter rows takes little time."""
TOKENS = 16_384
"""The number of tokens of a measurement, in rows of one length."""
TOLERANCE = 0.02
"""Kernels round differently, by less than 1 % of a result's norm."""
REPEATS = 3


class ShapeClass(NamedTuple):
    """Shapes of attention that share a choice."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    length: int
    """The length of the longest row, rounded up to a power of two."""


class Choice(NamedTuple):
    """The fastest kernels of a class, and the time of all that were measured."""

    eager: str
    captured: str
    seconds: dict[str, tuple[float, float]]
    """Name -> time of a forward and backward pass that is not captured, and of one that is."""


CHOICES: dict[ShapeClass, Choice] = {}
"""The choices made in this process."""


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention output [N, H, D] for queries [N, H, D], keys and values [R, K, D]."""
    name = FLASH if window is not None else _name_for(query, key, spans)
    return KERNELS[name](query, key, value, spans, scale, window)


def _name_for(query: torch.Tensor, key: torch.Tensor, spans: VarlenRows) -> str:
    if spans.longest_key < LONG or torch.are_deterministic_algorithms_enabled():
        return FLASH
    length = 1 << (spans.longest_key - 1).bit_length()
    shape = ShapeClass(
        query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2], length
    )
    capturing = torch.cuda.is_current_stream_capturing()
    if shape not in CHOICES:
        if capturing:  # nothing can be measured now; an earlier pass has measured most shapes
            return FLASH
        CHOICES[shape] = measured(shape)
    choice = CHOICES[shape]
    return choice.captured if capturing else choice.eager


def measured(shape: ShapeClass) -> Choice:
    """Measure all kernels on rows of one length, and choose the fastest."""
    seconds: dict[str, tuple[float, float]] = {}
    rows = _Rows.of(shape)
    expected = rows.results(FLASH)
    for name in KERNELS:
        try:
            if rows.differ(rows.results(name), expected):
                continue
            seconds[name] = _eager_seconds(rows, name), _captured_seconds(rows, name)
        except (ImportError, RuntimeError, NotImplementedError, TypeError):
            continue  # not installed, or not for this shape
    eager = min(seconds, key=lambda name: seconds[name][0])
    captured = min(seconds, key=lambda name: seconds[name][1])
    return Choice(eager, captured, seconds)


class _Rows:
    """Random queries, keys and values of rows of one length, and a gradient."""

    def __init__(self, tensors: list[torch.Tensor], grad: torch.Tensor, spans: VarlenRows) -> None:
        self.tensors, self.grad, self.spans = tensors, grad, spans

    @staticmethod
    def of(shape: ShapeClass) -> _Rows:
        tokens = max(shape.length, TOKENS // shape.length * shape.length)
        draw = torch.Generator(shape.device).manual_seed(0)

        def normal(heads: int) -> torch.Tensor:
            values = torch.randn(
                tokens, heads, shape.size, generator=draw, device=shape.device, dtype=shape.dtype
            )
            return values.requires_grad_()

        starts = torch.arange(0, tokens + 1, shape.length, device=shape.device, dtype=torch.int32)
        spans = VarlenRows(
            query_starts=starts,
            key_starts=starts,
            longest_query=shape.length,
            longest_key=shape.length,
        )
        tensors = [normal(heads) for heads in (shape.heads, shape.key_heads, shape.key_heads)]
        return _Rows(tensors, normal(shape.heads).detach(), spans)

    def results(self, name: str) -> list[torch.Tensor]:
        """Return the output, and the gradients of queries, keys and values."""
        with torch.enable_grad():
            query, key, value = self.tensors
            attended = KERNELS[name](query, key, value, self.spans, None, None)
            return [attended.detach(), *torch.autograd.grad(attended, self.tensors, self.grad)]

    def differ(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        """Return whether results differ by more than rounding."""
        pairs = zip(found, expected, strict=True)
        return any(
            not float((a.float() - b.float()).norm()) <= TOLERANCE * float(b.float().norm())
            for a, b in pairs
        )


def _eager_seconds(rows: _Rows, name: str) -> float:
    return _seconds(lambda: rows.results(name))


def _captured_seconds(rows: _Rows, name: str) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = rows.results(name)
    found = _seconds(graph.replay)
    del kept
    return found


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest of a few times, after one call that is not timed."""
    times = []
    for _ in range(1 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return min(times[1:])
