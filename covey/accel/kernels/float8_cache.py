"""Keys and values that are stored as float8 numbers, with one scale (unit) per head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(numbers, unit, kind: tl.constexpr, rounds: tl.constexpr):
    """Convert keys or values to the stored type; float8 numbers are divided by `unit` first."""
    if not rounds:
        return numbers
    return tl.clamp(numbers.to(tl.float32) / unit, -448.0, 448.0).to(kind)


@triton.jit
def units_of(units, head, key_heads: tl.constexpr, rounds: tl.constexpr):
    """Return the scales of a head's keys and values; both are 1 if the cache is not float8."""
    if not rounds:
        return 1.0, 1.0
    return tl.load(units + head), tl.load(units + key_heads + head)
