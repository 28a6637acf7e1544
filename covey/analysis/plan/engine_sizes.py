"""Copies of the engine's and the trainer's buffer sizes and limits, for memory forecasts.

The modules that define the sizes and limits import transformers' model code or Triton, which takes
seconds. This module repeats sizes and limits of other modules to avoid slow imports. The test
tests/analysis/plan/test_engine_sizes.py compares each value with its source.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

SHORT = 256
"""The largest sequence length at which attention on a CPU uses batched matmuls instead of a fused
kernel (accel/attention.py).
"""
LONG = 2048
"""If sequences have on average at least this many tokens, training may run without CUDA graphs
(accel/attention_kernels.py).
"""
FUSED_BYTES = 64 * 2**20
"""The engine concatenates projection weights only if they have at most this many bytes
(native/llama_decoder.py)."""
PREFILL_TOKENS = 16_384
"""The largest number of prompt tokens in one forward pass of prefill (native/prefill.py)."""
PREFILL_FLOPS = 1.2e13
"""A prefill with more FLOPs than this runs without a CUDA graph (native/prefill_graph.py)."""
CAPACITY_STEP = 32
"""The length of a KV-cache slot is a multiple of CAPACITY_STEP (native/backend.py)."""
SPARE_BYTES = 64 * 2**20
"""On a CPU, the engine keeps a KV cache of at most this many bytes for its next generation call
(native/backend.py)."""
PAGE, LEAST_PAGE = 128, 16
"""Largest and smallest page size, in tokens, of the KV cache for completions
(native/shared_prompt_cache.py)."""
PROMPT_STEP = 128
"""Cached prompts are padded to a multiple of PROMPT_STEP tokens (native/shared_prompt_cache.py)."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of concurrent completions for which the engine captures CUDA graphs
(native/shared_prompt_cache.py)."""
TOKEN_STEP = 256
"""Token counts are rounded up to a multiple of TOKEN_STEP; large counts are rounded up more
coarsely (accel/static_buffers.py).
"""
VOCABULARY_BLOCK = 2048
"""Number of vocabulary entries that one Triton program of the sampling kernel processes
(accel/kernels/sample.py)."""
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
    """Return the page size of the KV cache for completions of up to `capacity` tokens."""
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

    All prompts have `prompt` tokens, and all completions have `completion` tokens. The trainer's
    function `balanced_parts` in models/micro_batches.py forms the same largest micro-batch from
    `rows` completions in groups of `group_size`. A group with more than `micro_batch_tokens` tokens
    is split into pieces. The pieces of all groups are then packed into as few micro-batches as
    possible.
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
