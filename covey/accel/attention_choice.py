"""Choose the fastest kernel for attention over packed rows, by measurement on the device.

The fastest kernel depends on the device, the heads and the length of rows. A process measures
kernels once for each class of shapes. A measurement is a forward and a backward pass over rows of
equal length. A kernel that fails, or whose results differ from flash attention 2, is not used. For
long rows, all kernels are measured. For short rows, only kernels that can be part of a CUDA graph
are measured, because CUDA graphs save more time than a faster kernel would. With torch's
deterministic algorithms, only flash attention 2 is used.

The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-value
heads) and D (head size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from covey.accel.attention_kernels import FLASH, KERNELS, Inputs, Kept, attend
from covey.accel.varlen_attention import Bounds, VarlenRows

LONG = 2048
"""The rows of a micro-batch are called long if their mean length is at least this many tokens."""
NUMBERS = 2**24
"""Number of elements in the queries of a measurement. All rows of a measurement have equal length.
"""
SHORTEST = 128
"""All rows of up to this many tokens belong to one shape class."""
TOLERANCE = 0.02
"""Maximum relative difference between the results of two kernels. Because of rounding, correct
kernels differ by less than 1 % of the norm of the result."""
REPEATS = 3
CYCLES = 10_000_000
"""Number of clock cycles, a few milliseconds, for which the device is kept busy before each
measurement. Meanwhile the host launches the kernels, so that the launch time is not measured."""
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
    captured: bool = False
    """Whether only kernels that can be part of a CUDA graph are compared."""


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
    if window is None:
        captured = spans.bounds is None or not has_long_rows(spans.bounds.key)
        shape = (query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])
        name = chosen(*shape, spans.longest_key, captured)
    return attend(KERNELS[name], query, key, value, Inputs(spans, scale, window), kept)


def has_long_rows(key_bounds: Sequence[int]) -> bool:
    """Return whether the mean row length is at least LONG, given the offsets of the rows' keys."""
    return key_bounds[-1] >= LONG * (len(key_bounds) - 1)


def chosen(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    size: int,
    longest: int,
    captured: bool = False,
) -> str:
    """Return the name of the fastest kernel. The first call for a shape class measures the kernels.

    If `captured` is true, only kernels that can be part of a CUDA graph are compared. A pass is
    captured at the third micro-batch of its size, so its class has been measured before.
    """
    # In a deterministic process, no measurement decides. The engine skips torch's check of
    # operations, but not this flag.
    deterministic = (
        torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    )
    if deterministic or device.type != "cuda":
        return FLASH
    length = max(SHORTEST, 1 << (longest - 1).bit_length())
    shape = ShapeClass(device, dtype, heads, key_heads, size, length, captured)
    if shape not in CHOICES:
        CHOICES[shape] = measured(shape)
    return CHOICES[shape].name


def chosen_for(
    config: Any, device: torch.device, dtype: torch.dtype, longest: int, captured: bool = False
) -> str:
    """Return the name of the fastest kernel for rows of a transformers model."""
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return chosen(device, dtype, heads, key_heads, size, longest, captured)


def description(config: Any, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Describe the attention kernel for rows of up to `longest` tokens, with measured times."""
    short = longest < LONG
    name = chosen_for(config, device, dtype, longest, short)
    measurements = [
        choice.seconds
        for shape, choice in CHOICES.items()
        if shape.length >= longest and shape.captured is short
    ]
    if not measurements:
        return name
    times = (f"{kernel} {1000 * time:.1f} ms" for kernel, time in measurements[0].items())
    return f"{name} for {'short' if short else 'long'} rows (measured: {', '.join(times)})"


@torch.inference_mode(False)
def measured(shape: ShapeClass) -> Choice:
    """Measure kernels on rows of equal length, and choose the fastest kernel.

    The first pass of a class may be the engine's prefill in inference mode, which has no gradients.
    """
    rows = _Rows(shape)
    expected = rows.results(FLASH)
    seconds: dict[str, float] = {}
    for name, kernel in KERNELS.items():
        if shape.captured and not kernel.captured:
            continue
        try:
            if rows.agree(rows.results(name), expected):
                seconds[name] = _seconds(partial(rows.results, name))
        except (RuntimeError, NotImplementedError, ImportError):
            continue  # not for this shape, or not installed
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
        rows = max(1, NUMBERS // (shape.heads * shape.size * shape.length))
        tokens = rows * shape.length
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
        # The first pass of a run may be that of a checkpointed layer, whose hooks would recompute
        # the layer here.
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            attended = attend(KERNELS[name], query, key, value, Inputs(self.spans, None))
            return [attended.detach(), *torch.autograd.grad(attended, self.tensors[:3], grad)]

    def agree(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        """Return whether results differ only by rounding."""
        return all(
            float((a.float() - b.float()).norm()) <= TOLERANCE * float(b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
        torch.cuda._sleep(CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return min(times[1:])
