"""Sizes and limits of forward and backward passes, in a module that does not import torch.

The memory forecast (covey/lab/plan) reads these sizes without torch, because importing torch
takes seconds.
"""

from __future__ import annotations

from typing import Any

SHORT = 256
"""Maximum sequence length at which batched matmuls beat the fused attention kernel on a CPU."""
LONG = 2048
"""Minimum mean length, in tokens, at which the rows of a micro-batch are treated as long rows."""
TOKEN_STEP = 256
"""CUDA graphs pad a batch to the token count of a bucket, which is a multiple of `TOKEN_STEP`."""
VOCABULARY_BLOCK = 2048
"""Number of vocabulary entries that one Triton program of the sampling kernel processes."""
CHUNK_STEP = 128
"""Number of rows of a tile on tensor cores. On a GPU, chunks of more than `CHUNK_STEP` tokens are
rounded down to a multiple of `CHUNK_STEP` tokens."""
LIVE_COPIES = 3
"""Number of tensors that the output head has in memory for each chunk: the logits, a buffer for
intermediate results, and the gradient in the weight's dtype."""


def chunk_rows(vocabulary: int, megabytes: float, element_bytes: int = 4) -> int:
    """Return how many tokens a chunk may have so that its tensors fit in `megabytes`."""
    return max(1, int(megabytes * 2**20 / (vocabulary * element_bytes * LIVE_COPIES)))


def kernel_chunk_rows(vocabulary: int, megabytes: float, element_bytes: int) -> int:
    """Return how many tokens a chunk may have on a GPU, where kernels overwrite the logits.

    The memory of a chunk consists of float32 logits and, with a 16-bit weight, a 16-bit gradient of
    the logits.
    """
    size = 4 if element_bytes == 4 else 4 + element_bytes
    rows = max(1, int(megabytes * 2**20 / (vocabulary * size)))
    return rows - rows % CHUNK_STEP if rows > CHUNK_STEP else rows


def padded_tokens(count: int) -> int:
    """Round a token count up to a bucket size, by at most `max(count / 16, TOKEN_STEP)` tokens."""
    return round_up(count, 16)


def round_up(count: int, steps: int) -> int:
    """Round up to a multiple of `TOKEN_STEP`; allow at most `steps` sizes per power of two."""
    step = max(TOKEN_STEP, power_of_two(count, 2) // 2 // steps)
    return max(1, -(-count // step)) * step


def power_of_two(count: int, least: int) -> int:
    """Round up to a power of two that is at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


# Whether the fast paths support a model's attention and position embeddings.

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles depend only on the position."""


def plain_positions(config: Any) -> bool:
    """Return whether all layers have full causal attention and RoPE of a type in PLAIN_ROPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    window = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    plain = rope.get("rope_type", "default") in PLAIN_ROPE
    turned = all(getattr(config, "no_rope_layers", None) or ())  # 0: a layer without RoPE
    scaled = rope.get("llama_4_scaling_beta")  # queries scaled by position
    return plain and turned and not scaled and kinds == {"full_attention"} and not window
