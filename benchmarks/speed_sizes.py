"""How large every section of the speed benchmark is: on a GPU, and to try it out on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from speed_shapes import Shape, shapes, tiny_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured, and how often."""

    device: str
    dtype: torch.dtype
    shapes: Mapping[str, Shape]
    prompt: int = 128
    tokens: int = 256
    group: int = 8
    repeat: int = 5
    """Timed runs, of which the median and the best are told."""
    copied_megabytes: int = 4096

    sampler: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"smollm2": (128, 512, 1024), "qwen2.5": (128, 512)}
    )
    """Answers at a time."""
    peer_answers: int = 128
    peer_tokens: int = 64
    """Fewer than covey writes: peers take as long for each token, and are slow."""

    plain_rows: Mapping[str, int] = field(default_factory=lambda: {"smollm2": 32, "qwen2.5": 16})
    """Sequences in the update of the plain peer, whose logits have to fit."""

    prompts: int = 16
    """Of a step; so many groups."""
    warmup: int = 3
    steps: int = 10
    trl_steps: int = 1
    """After one to warm up."""

    ragged_answers: int = 1024
    ragged_slots: int = 128
    ragged_longest: int = 1024
    ragged_mean: int = 200

    linear: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)

    seed_prompts: int = 2
    seed_tokens: int = 400
    seed_steps: int = 20
    startup_answers: int = 512

    logp_answers: int = 64
    greedy_answers: int = 32
    greedy_tokens: int = 64

    updates: Mapping[str, tuple[Mapping[str, Any], ...]] = field(
        default_factory=lambda: {
            "smollm2": ({},),
            "qwen2.5": ({}, {"checkpointing": True, "state": "compact"}),
        }
    )
    """Settings of update_gpu.py: as fast as it goes and, for the larger shape, as small."""

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
        "sampler": {"smollm2": (8, 16), "qwen2.5": (8,)}, "peer_answers": 8, "peer_tokens": 4,
        "plain_rows": {"smollm2": 4, "qwen2.5": 4}, "prompts": 2, "warmup": 1, "steps": 2,
        "ragged_answers": 64, "ragged_slots": 8, "ragged_longest": 64, "ragged_mean": 12,
        "linear": (4, 8, 16), "seed_tokens": 12, "seed_steps": 2, "startup_answers": 16,
        "logp_answers": 8, "greedy_answers": 8, "greedy_tokens": 12,
    }  # fmt: skip
    return Sizes(device=device, dtype=torch.float32, shapes=tiny_shapes(), **{**tiny, **changes})
