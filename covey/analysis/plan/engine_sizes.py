"""Buffer sizes and limits of the native engine and the trainer that memory forecasts need.

The modules that define the sizes and limits import transformers' model code or Triton, which takes
seconds. This module therefore repeats the values, and tests/analysis/plan/test_engine_sizes.py
compares each value with its source.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

SHORT = 256
"""The largest number of positions for which attention on a CPU uses two batched matmuls
(accel/attention.py).
"""
LONG = 2048
"""The smallest mean sequence length at which training may run without CUDA graphs
(accel/attention_kernels.py).
"""
FUSED_BYTES = 64 * 2**20
"""Largest size in bytes at which projections are concatenated (native/llama_decoder.py)."""
PREFILL_TOKENS = 16_384
"""The largest number of prompt tokens in one forward pass of prefill (native/prefill.py)."""
PREFILL_FLOPS = 1.2e13
"""FLOPs of the largest prefill that a CUDA graph captures (native/prefill_graph.py)."""
CAPACITY_STEP = 32
"""The length of a KV-cache slot is a multiple of CAPACITY_STEP (native/backend.py)."""
SPARE_BYTES = 64 * 2**20
"""Maximum size in bytes of a KV cache that is kept between steps (native/backend.py)."""
PAGE, LEAST_PAGE = 128, 16
"""Largest and smallest page of the completion cache (native/shared_prompt_cache.py), in tokens."""
PROMPT_STEP = 128
"""Cached prompts are padded to a multiple of PROMPT_STEP tokens (native/shared_prompt_cache.py)."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of slots for which CUDA graphs are captured (native/shared_prompt_cache.py)."""
TOKEN_STEP = 256
"""Token counts are padded to multiples of TOKEN_STEP or, if large, of a larger number
(accel/static_buffers.py).
"""
VOCABULARY_BLOCK = 2048
"""Number of vocabulary entries per program of the sampling kernel (accel/kernels/sample.py)."""
CHUNK_STEP = 128
"""In large chunks of logits, the number of tokens is a multiple of CHUNK_STEP
(accel/fused_head.py).
"""


def width_for(completions: int) -> int:
    """Return the number of KV-cache slots for generating this many completions at once."""
    if completions > WIDTHS[-1]:
        return -(-completions // WIDTHS[-1]) * WIDTHS[-1]
    return next(width for width in WIDTHS if width >= completions)


def page_for(capacity: int) -> int:
    """Return the number of tokens in a page, for completions of up to `capacity` tokens."""
    return min(PAGE, max(LEAST_PAGE, 1 << (capacity - 1).bit_length()))


def padded_tokens(count: int) -> int:
    """Round a token count up to a count for which CUDA graphs are captured."""
    power = max(2, 1 << max(0, count - 1).bit_length())
    step = max(TOKEN_STEP, power // 2 // 16)
    return max(1, -(-count // step)) * step


@lru_cache(maxsize=256)
def largest_micro_batch(
    rows: int, group_size: int, prompt: int, completion: int, micro_batch_tokens: int
) -> tuple[int, int]:
    """Return the numbers of completions and of prompts in the largest micro-batch on a GPU.

    All prompts have `prompt` tokens, and all completions have `completion` tokens. The result
    equals the result of `balanced` in accel/packing.py, for `rows` rows in groups of `group_size`.
    A group is split into pieces that fit the token budget. The pieces of all groups are distributed
    over the fewest micro-batches.
    """
    groups = -(-rows // group_size)
    if groups * prompt + rows * (completion - 1) <= micro_batch_tokens:
        return rows, groups
    room = micro_batch_tokens - prompt
    most = max(1, room // (completion - 1)) if completion > 1 else (group_size if room >= 0 else 1)
    pieces = [
        (min(most, size - start), group)
        for group in range(groups)
        for size in [min(group_size, rows - group * group_size)]
        for start in range(0, size, most)
    ]
    pieces.sort(key=lambda piece: -piece[0])
    count = max(1, -(-(len(pieces) * prompt + rows * (completion - 1)) // micro_batch_tokens))
    while True:
        parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        heap = [(0, part) for part in range(count)]
        for piece in pieces:  # the largest piece first, into the micro-batch with the fewest tokens
            tokens, part = heap[0]
            parts[part].append(piece)
            heapq.heapreplace(heap, (tokens + prompt + piece[0] * (completion - 1), part))
        if count >= len(pieces) or max(heap)[0] <= micro_batch_tokens:
            sizes = [(sum(n for n, _ in part), len({g for _, g in part})) for part in parts]
            return max(sizes, key=lambda size: size[0] * (completion - 1) + size[1] * prompt)
        count += 1
