"""Choose the fastest kernel for attention over packed rows, by measurement on the device.

The fastest kernel depends on the device, the heads and the length of rows. For long rows, a process
measures all kernels once for each class of shapes. A measurement is a forward and a backward pass
over rows of equal length. A kernel that fails, or whose results differ from flash attention 2, is
not used. Short rows always use flash attention, because CUDA graphs need it and save more time than
a faster kernel would. With torch's deterministic algorithms, only flash attention 2 is used.

The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-value
heads) and D (head size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from covey.accel.attention_kernels import FLASH, KERNELS, Inputs, Kept, attend
from covey.accel.varlen_attention import Bounds, VarlenRows

LONG = 2048
"""The rows of a micro-batch are called long if their mean length is at least this many tokens."""
TOKENS = 16_384
"""Number of tokens in a measurement, in rows of equal length."""
TOLERANCE = 0.02
"""Maximum relative difference between the results of two kernels. Because of rounding, correct
kernels differ by less than 1 % of the norm of the result."""
REPEATS = 3
FLASH3 = "FlashAttention 3"


class ShapeClass(NamedTuple):
    """A class of attention shapes for which the same kernel is chosen."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    length: int
    """The length of the longest row, rounded up to a power of two."""


class Choice(NamedTuple):
    """The fastest kernel of a shape class, and the seconds of all measured kernels."""

    name: str
    seconds: dict[str, float]


CHOICES: dict[ShapeClass, Choice] = {}
"""The kernel choices made in this process."""


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None = None,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Return the attention output [N, H, D] for queries [N, H, D], keys and values [R, K, D].

    If `kept` is an empty list, the output is also stored in the list. If `kept` contains an output
    of an earlier call, that output is removed from the list and returned.
    """
    name = FLASH
    if window is None and spans.bounds is not None and has_long_rows(spans.bounds.key):
        shape = (query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])
        name = chosen(*shape, spans.longest_key)
    return attend(KERNELS[name], query, key, value, Inputs(spans, scale, window), kept)


def has_long_rows(key_bounds: Sequence[int]) -> bool:
    """Return whether the mean row length is at least LONG, given the offsets of the rows' keys."""
    return key_bounds[-1] >= LONG * (len(key_bounds) - 1)


def chosen(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, longest: int
) -> str:
    """Return the fastest kernel for long rows.

    The first call for a shape class measures all kernels; later calls use the measured result.
    """
    if torch.are_deterministic_algorithms_enabled() or device.type != "cuda":
        return FLASH
    length = 1 << (longest - 1).bit_length()
    shape = ShapeClass(device, dtype, heads, key_heads, size, length)
    if shape not in CHOICES:
        CHOICES[shape] = measured(shape)
    return CHOICES[shape].name


def chosen_for(config: Any, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Return the name of the fastest kernel for long rows of a transformers model."""
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return chosen(device, dtype, heads, key_heads, size, longest)


def description(config: Any, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Describe the attention kernel for rows of up to `longest` tokens, with measured times."""
    if longest < LONG:
        return FLASH
    name = chosen_for(config, device, dtype, longest)
    measurements = [c.seconds for shape, c in CHOICES.items() if shape.length >= longest]
    if not measurements:
        return name
    times = (f"{kernel} {1000 * time:.1f} ms" for kernel, time in measurements[0].items())
    return f"{name} for long rows (measured: {', '.join(times)})"


def measured(shape: ShapeClass) -> Choice:
    """Measure all kernels on rows of equal length, and choose the fastest kernel."""
    rows = _Rows(shape)
    expected = rows.results(FLASH)
    seconds: dict[str, float] = {}
    for name in KERNELS:
        try:
            if rows.agree(rows.results(name), expected):
                seconds[name] = _seconds(partial(rows.results, name))
        except (RuntimeError, NotImplementedError):
            continue  # not for this shape
    if _activate_flash3() and not _keeps_flash3(rows, expected, seconds):
        _restore_flash2()
    name = min(KERNELS, key=lambda name: seconds.get(name, float("inf")))
    return Choice(name, seconds)


def _keeps_flash3(rows: _Rows, expected: list[torch.Tensor], seconds: dict[str, float]) -> bool:
    """Measure FlashAttention 3, which must be active; return whether it is correct and faster."""
    try:
        right = rows.agree(rows.results(FLASH), expected)
        seconds[FLASH3] = _seconds(partial(rows.results, FLASH))
    except (RuntimeError, NotImplementedError):
        return False  # not for this shape
    if not right or seconds[FLASH3] >= seconds[FLASH]:
        return False
    seconds[FLASH] = seconds[FLASH3]
    return True


class _Rows:
    """Random queries, keys and values of rows of equal length, and a random gradient."""

    def __init__(self, shape: ShapeClass) -> None:
        tokens = max(shape.length, TOKENS)
        bounds = tuple(range(0, tokens + 1, shape.length))
        starts = torch.tensor(bounds, device=shape.device, dtype=torch.int32)
        self.spans = VarlenRows(
            query_starts=starts,
            key_starts=starts,
            longest_query=shape.length,
            longest_key=shape.length,
            bounds=Bounds(bounds, bounds),
        )
        draw = torch.Generator(shape.device).manual_seed(0)
        self.tensors = [
            torch.randn(
                tokens, heads, shape.size, generator=draw, device=shape.device, dtype=shape.dtype
            ).requires_grad_()
            for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
        ]

    def results(self, name: str) -> list[torch.Tensor]:
        """Return the output, and the gradients of queries, keys and values."""
        query, key, value, grad = self.tensors
        with torch.enable_grad():
            attended = attend(KERNELS[name], query, key, value, Inputs(self.spans, None))
            return [attended.detach(), *torch.autograd.grad(attended, self.tensors[:3], grad)]

    def agree(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        """Return whether results differ only by rounding."""
        return all(
            float((a.float() - b.float()).norm()) <= TOLERANCE * float(b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )


def _activate_flash3() -> bool:
    """Let torch's operators run FlashAttention 3, if its package is installed."""
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except (ImportError, ValueError, RuntimeError):
        return False
    return True


def _restore_flash2() -> None:
    from torch.nn.attention import restore_flash_attention_impl

    restore_flash_attention_impl()


def _seconds(call: Callable[[], object]) -> float:
    """Return the minimum time of several calls, after a warm-up call."""
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
