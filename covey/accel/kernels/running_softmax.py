"""Running softmax over tiles, and merging of partial softmaxes of several Triton programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_softmax(score, value, largest, total, result, precision: tl.constexpr):
    """Add a tile of positions to a running softmax; a position's weight is 2 ** score."""
    larger = tl.maximum(largest, tl.max(score, axis=1))
    shrink = tl.exp2(largest - larger)
    weight = tl.exp2(score - larger[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    result = result * shrink[:, None]
    result += tl.dot(weight.to(value.dtype), value, input_precision=precision)
    return larger, total, result


@triton.jit
def _add_part(part, largest, total, result, rows: tl.constexpr, size: tl.constexpr):
    """Add the partial softmax that is stored at `part` to a running softmax."""
    row = tl.arange(0, rows)
    cell = row[:, None] * size + tl.arange(0, size)
    # Another multiprocessor may have written the part, so the loads bypass the L1 cache.
    new = tl.load(part + cell, cache_modifier=".cg")
    other = tl.load(part + rows * size + row, cache_modifier=".cg")
    weight = tl.load(part + rows * size + rows + row, cache_modifier=".cg")
    larger = tl.maximum(largest, other)
    mine, theirs = tl.exp2(largest - larger), tl.exp2(other - larger)
    total = total * mine + weight * theirs
    return larger, total, result * mine[:, None] + new * theirs[:, None]


@triton.jit
def merge_parts(
    parts, flag, part, count, largest, total, result,
    rows: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Combine partial softmaxes: part 0 adds the results that all other parts store."""
    stride: tl.constexpr = rows * (size + 2)
    if part == 0:
        while tl.atomic_add(flag, 0, sem="acquire") < count - 1:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(flag, 0)
        for other in range(1, count):
            largest, total, result = _add_part(
                parts + other * stride, largest, total, result, rows, size
            )
    else:
        row = tl.arange(0, rows)
        cell = parts + part * stride
        tl.store(cell + row[:, None] * size + tl.arange(0, size), result)
        tl.store(cell + rows * size + row, largest)
        tl.store(cell + rows * size + rows + row, total)
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release")
    return largest, total, result
