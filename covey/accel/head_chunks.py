"""Chunk size of the output head's logits, in a module that does not import torch."""

from __future__ import annotations

LIVE_COPIES = 3
"""Number of tensors that the output head has in memory for each chunk: the logits, a buffer for
intermediate results and a rounded copy."""


def chunk_rows(vocabulary: int, megabytes: float, element_bytes: int = 4) -> int:
    """Return how many tokens a chunk may have so that its tensors fit in `megabytes`."""
    return max(1, int(megabytes * 2**20 / (vocabulary * element_bytes * LIVE_COPIES)))
