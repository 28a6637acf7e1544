"""Sizes of every section of the speed benchmark, on a GPU and for a trial on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from speed_shapes import Shape, shapes, tiny_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured, and how many times."""

    device: str
    dtype: torch.dtype
    shapes: Mapping[str, Shape]
    prompt: int = 128
    tokens: int = 256
    group: int = 8
    repeat: int = 5
    """Timed calls; the median and the best are reported."""
    copied_megabytes: int = 4096

    sampler: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"smollm2": (128, 512, 1024), "qwen2.5": (128, 512)}
    )
    """Concurrent completions."""
    peer_completions: int = 128
    peer_tokens: int = 64
    """Fewer tokens than covey generates: peers are slow, and their time per token is constant."""

    long_shape: str = "qwen2.5"
    long_completions: int = 64
    long_tokens: int = 16_384
    long_written: tuple[int, ...] = (2_048, 8_192, 16_384)
    long_paused: int = 1_024
    """Tokens of the completions whose KV cache has room for half of them."""

    plain_rows: Mapping[str, int] = field(default_factory=lambda: {"smollm2": 32, "qwen2.5": 16})
    """Sequences in the plain peer's update, limited by the memory of its logits."""

    prompts: int = 16
    """Groups per step."""
    warmup: int = 3
    steps: int = 10
    trl_steps: int = 1
    """Timed steps, after one warm-up step."""

    ragged_completions: int = 1024
    ragged_slots: int = 128
    ragged_longest: int = 1024
    ragged_mean: int = 200

    linear: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)

    seed_prompts: int = 2
    seed_tokens: int = 400
    seed_steps: int = 20
    startup_completions: int = 512

    float8: tuple[int, ...] = (128, 512)
    """Concurrent completions of the largest model."""

    logp_completions: int = 64
    greedy_completions: int = 32
    greedy_tokens: int = 64

    updates: Mapping[str, tuple[Mapping[str, Any], ...]] = field(
        default_factory=lambda: {
            "smollm2": ({},),
            "qwen2.5": ({}, {"checkpointing": True, "state": "compact"}),
        }
    )
    """Settings of update_gpu.py: fastest and, for the larger shape, smallest in memory."""

    @property
    def dtype_name(self) -> str:
        """Such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


def sizes_for(device: str, **changes: Any) -> Sizes:
    """Return published shapes for a GPU, and tiny ones for a CPU."""
    if device.startswith("cuda"):
        return Sizes(device=device, dtype=torch.bfloat16, shapes=shapes(), **changes)
    tiny = {
        "prompt": 8, "tokens": 16, "group": 4, "repeat": 2, "copied_megabytes": 64,
        "sampler": {"smollm2": (8, 16), "qwen2.5": (8,)}, "peer_completions": 8, "peer_tokens": 4,
        "plain_rows": {"smollm2": 4, "qwen2.5": 4}, "prompts": 2, "warmup": 1, "steps": 2,
        "ragged_completions": 64, "ragged_slots": 8, "ragged_longest": 64, "ragged_mean": 12,
        "long_completions": 8, "long_tokens": 64, "long_written": (16, 48), "long_paused": 32,
        "linear": (4, 8, 16), "seed_tokens": 12, "seed_steps": 2, "startup_completions": 16,
        "float8": (8,),
        "logp_completions": 8, "greedy_completions": 8, "greedy_tokens": 12,
    }  # fmt: skip
    return Sizes(device=device, dtype=torch.float32, shapes=tiny_shapes(), **{**tiny, **changes})
