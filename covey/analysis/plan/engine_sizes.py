"""Buffer sizes and limits of the native engine and the trainer, as far as a forecast needs them.

The modules that define them import transformers' model code or Triton, which takes seconds. So the
values are repeated here, and tests/analysis/plan/test_engine_sizes.py compares each with its
source.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

SHORT = 256
"""accel/attention.py: up to this many positions, CPU attention is two batched products."""
FUSED_BYTES = 64 * 2**20
"""native/llama_decoder.py: projections are concatenated up to this size."""
PREFILL_TOKENS = 16_384
"""native/prefill.py: prompt tokens in one forward pass."""
CAPACITY_STEP = 32
"""native/backend.py: the length of a KV-cache slot is a multiple of this."""
SPARE_BYTES = 64 * 2**20
"""native/backend.py: a KV cache up to this size is kept between steps."""
PROMPT_STEP = 128
"""native/shared_prompt_cache.py: positions of a cached prompt are a multiple of this."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""native/shared_prompt_cache.py: numbers of slots that CUDA graphs are captured for."""
TOKEN_STEP = 256
"""accel/static_buffers.py: the smallest difference between two padded token counts."""
VOCABULARY_BLOCK = 2048
"""accel/kernels/sample.py: vocabulary entries that one program of the sampling kernel reads."""
CHUNK_STEP = 128
"""accel/fused_head.py: a chunk with more rows of logits is rounded to a multiple of this."""


def width_for(completions: int) -> int:
    """Return the number of KV-cache slots for this many completions at once."""
    if completions > WIDTHS[-1]:
        return -(-completions // WIDTHS[-1]) * WIDTHS[-1]
    return next(width for width in WIDTHS if width >= completions)


def padded_tokens(count: int) -> int:
    """Round a token count up to a count for which training captures CUDA graphs."""
    power = max(2, 1 << max(0, count - 1).bit_length())
    step = max(TOKEN_STEP, power // 2 // 16)
    return max(1, -(-count // step)) * step


@lru_cache(maxsize=256)
def largest_micro_batch(
    rows: int, group_size: int, prompt: int, completion: int, micro_batch_tokens: int
) -> tuple[int, int]:
    """Return rows and prompts of the fullest micro-batch on a GPU, if all lengths are equal.

    This computes accel/packing.py's `balanced` for `rows` rows in groups of `group_size`. A group
    is cut into pieces within the token budget; the pieces are spread over the fewest micro-batches.
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
