"""Fetches weights into the L2 cache while another kernel runs.

Decode attention leaves a part of the memory bandwidth unused, and the small products after it wait
mostly for their weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LINE = 128
"""Bytes that are fetched at once."""
BLOCK = 512


@triton.jit
def _fetch(weight, lines, block: tl.constexpr, line: tl.constexpr):
    at = tl.minimum(tl.program_id(0) * block + tl.arange(0, block), lines - 1).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight.to(tl.int64) + at * line],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def fetch(weight: torch.Tensor, most: int) -> int:
    """Fetch up to `most` bytes of a weight; return their number."""
    lines = min(weight.numel() * weight.element_size(), most) // LINE
    if lines > 0:
        _fetch[(triton.cdiv(lines, BLOCK),)](weight, lines, block=BLOCK, line=LINE, num_warps=4)
    return lines * LINE
