"""Sizes and limits of the native engine, in a module that does not import torch.

The memory forecast (covey/lab/plan) also reads these sizes, and torch takes seconds to import.
"""

from __future__ import annotations

CAPACITY_STEP = 32
"""Slot capacity is rounded up to a multiple of this number, so that later calls can reuse a cache.
"""
SPARE_BYTES = 64 * 2**20
"""Maximum size in bytes of a KV cache that the eager backend keeps for the next call."""
FUSED_BYTES = 64 * 2**20
"""Weights of up to `FUSED_BYTES` bytes are copied into fused matrices at the start of every
generation call. Copying small weights is cheap, and one matrix product is faster than several small
matrix products. Weights of more than `FUSED_BYTES` bytes are used in place."""
PREFILL_TOKENS = 16_384
"""The maximum number of prompt tokens in one prefill pass, including padding."""
PREFILL_FLOPS = 1.2e13
"""Maximum number of floating-point operations in a prefill pass that is captured. In a pass with
more than `PREFILL_FLOPS` operations, the device is slower than Python's kernel launches, so a graph
would take memory and save no time.
"""
PROMPT_STEP = 128
"""The capacity for prompt tokens is rounded up to a multiple of this number, so that later calls
can reuse a cache."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Slot counts for which graphs are captured; larger counts are multiples of the last count."""
PAGE = 128
"""Maximum number of positions in a page of the KV cache. Attention reads tiles of up to `PAGE`
positions, and a tile must not cross the boundary of a page."""
LEAST_PAGE = 16
"""Minimum number of positions in a page: the smallest tile of tensor cores."""
STEADY_ROWS = 8
"""The number of slots is a multiple of STEADY_ROWS if rounding must not depend on other slots,
because matrix products may round the last rows of other numbers of rows differently."""


def width_for(completions: int) -> int:
    """Round `completions` up to a number of slots for which graphs are captured."""
    if completions > WIDTHS[-1]:
        return -(-completions // WIDTHS[-1]) * WIDTHS[-1]
    return next(width for width in WIDTHS if width >= completions)


def page_for(capacity: int) -> int:
    """Return the page size for completions of up to `capacity` tokens."""
    return min(PAGE, max(LEAST_PAGE, 1 << (capacity - 1).bit_length()))
