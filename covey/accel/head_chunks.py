"""Chunk size with which the output head computes logits; this module does not import torch."""

from __future__ import annotations

LIVE_COPIES = 3
"""Number of tensors of a chunk's size that are in memory at the same time: the logits, a buffer for
intermediate results and a rounded copy."""


def chunk_rows(vocabulary: int, megabytes: float, element_bytes: int = 4) -> int:
    """Return how many tokens a chunk may have so that its tensors fit in `megabytes`."""
    return max(1, int(megabytes * 2**20 / (vocabulary * element_bytes * LIVE_COPIES)))
