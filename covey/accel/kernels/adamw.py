"""In-place GPU AdamW with bfloat16 moments; float32 weights may be stored as 16-bit halves.

The results are bit-identical to the results of covey/policy/optimizer.py on a CPU. To match
the CPU, the kernel uses no fused multiply-add, rounds divisions and square roots correctly, and
computes its random numbers from the same counters as the CPU code. The exact arithmetic takes no
extra time, because memory bandwidth limits the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _mixed(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _rounded(values, random):
    """Stochastically round float32 to bfloat16, up with probability (lower 16 bits) / 2^16."""
    bits = values.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return (bits + tl.where(finite, random.to(tl.int32), 0)) >> 16


@triton.jit
def _wide(bits):
    """Convert bfloat16 bits to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["key", "other_key", "first_index"])
def _adamw(
    weight, low, grad, first, second, count, key, other_key, first_index,
    clip, beta1, rest1, beta2, rest2, keep, size, inverse_root, eps,
    halves: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(weight + at, mask=inside, other=0)
    if halves:
        lower = tl.load(low + at, mask=inside, other=0).to(tl.int32)
        value = ((value.to(tl.int32) << 16) + lower).to(tl.float32, bitcast=True)
    pull = tl.load(grad + at, mask=inside, other=0.0) * clip
    mean = _wide(tl.load(first + at, mask=inside, other=0)) * beta1 + pull * rest1
    square = _wide(tl.load(second + at, mask=inside, other=0)) * beta2 + (pull * pull) * rest2
    value = value * keep
    value = value - tl.div_rn(mean, tl.sqrt_rn(square) * inverse_root + eps) * size
    index = (at + first_index).to(tl.uint32)
    random = _mixed(_mixed(index ^ key.to(tl.uint32)) ^ other_key.to(tl.uint32))
    tl.store(first + at, _rounded(mean, random & 0xFFFF).to(tl.int16), mask=inside)
    tl.store(second + at, _rounded(square, random >> 16).to(tl.int16), mask=inside)
    if halves:
        bits = value.to(tl.int32, bitcast=True)
        broken = value != value
        upper = tl.where(broken, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        lower = tl.where(broken, 0, bits - (upper << 16))
        tl.store(weight + at, upper.to(tl.int16), mask=inside)
        tl.store(low + at, lower.to(tl.int16), mask=inside)
    else:
        tl.store(weight + at, value, mask=inside)


def adamw(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[float, ...],
    keys: tuple[int, int],
    first_index: int = 0,
) -> None:
    """Run an AdamW step on a GPU; the arguments are those of `training.compact_adamw.adamw`."""
    count = weight.numel()
    _adamw[(triton.cdiv(count, BLOCK),)](
        weight, weight if low is None else low, grad, *moments, count, *keys, first_index, *numbers,
        halves=low is not None, block=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
