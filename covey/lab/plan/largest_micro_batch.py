"""Computes the largest micro-batch of a training step without generating rollouts."""

from __future__ import annotations

import heapq
from functools import lru_cache


@lru_cache(maxsize=256)
def largest_micro_batch(
    rows: int, group_size: int, prompt: int, completion: int, micro_batch_tokens: int
) -> tuple[int, int]:
    """Return the numbers of completions and of prompts in the largest micro-batch on a GPU.

    The trainer divides `rows` completions, in groups of `group_size`, into micro-batches with
    `balanced_parts` (parallel/passes.py). `balanced_parts` splits groups of more than
    `micro_batch_tokens` tokens, and packs the parts into as few micro-batches as possible. Each
    prompt has `prompt` tokens, and each completion has `completion` tokens.
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
