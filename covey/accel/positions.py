"""Check whether the GPU fast path supports a model's attention and position embeddings."""

from __future__ import annotations

from typing import Any

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
