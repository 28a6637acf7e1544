"""Decode step with a model's own forward pass in transformers, for any architecture.

There are three decoders. The fastest decoder, `SharedPromptDecoder`, uses a shared-prompt cache,
and its decode step can be captured as a CUDA graph. `TransformersDecoder` uses a cache whose slots
store prompt and completion. The slowest decoder, `RecomputeDecoder`, uses no KV cache, and
therefore supports models whose state is more than keys and values.

In tensor shapes, W stands for occupied slots, S for all slots, L for positions, H for heads, K for
key-value heads, and D for the head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from covey.accel.attention import NAME
from covey.accel.attention_kernels import QKV
from covey.engines.native.kv_cache import SlotCache, attention_mask
from covey.engines.native.llama_decoder import Decoder, UnsupportedModel
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.models.language_model import LanguageModel

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Supported layer types: attention to all earlier positions, or to a window of positions."""


@dataclass(frozen=True, slots=True)
class TransformersDecoder(Decoder):
    """A decoder that runs the model's forward pass on a `SlotCache`."""

    model: LanguageModel

    def __post_init__(self) -> None:
        # GPT-Neo places each window at the last key, which is right only for the longest slot.
        if "local" in (getattr(self.model.model.config, "attention_layers", None) or ()):
            raise UnsupportedModel("its local layers assume that all slots have the same length")

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        place = cache.place[: cache.width]
        dtype = self.model.head.linear.weight.dtype
        hidden: torch.Tensor = self.model.backbone(
            input_ids=tokens[:, None],
            attention_mask=attention_mask(self.model.model.config, place, cache.reach, dtype),
            position_ids=place[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden[:, 0]


class SharedPromptDecoder(Decoder):
    """A decoder that runs the model's forward pass over a shared-prompt cache.

    The decoder's own code never synchronizes with the CPU, but the model's code may.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        config: Any = model.backbone.config
        if model.model.config._attn_implementation != NAME:
            raise UnsupportedModel("its attention is not transformers' standard attention")
        self.windows = _windows(config)

    def step(self, tokens: torch.Tensor, cache: SharedPromptCache) -> torch.Tensor:
        width = len(tokens)
        view = _CacheView(cache, self.windows)
        position = cache.prompt_length[:width] + cache.place[:width]
        hidden: torch.Tensor = self.model.backbone(
            input_ids=tokens[:, None],
            # transformers passes a four-dimensional mask on unchanged and builds no other mask.
            attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
            position_ids=position[:, None],
            past_key_values=view,
            packing=view,
            use_cache=True,
        ).last_hidden_state
        if view.attended != len(cache.layer_keys):
            raise UnsupportedModel("some of its layers do not call the registered attention")
        return hidden[:, 0]


class _CacheView(Cache):  # type: ignore[misc] # transformers is untyped
    """A shared-prompt cache in the form of a transformers cache with an attention function."""

    def __init__(
        self, cache: SharedPromptCache, windows: Sequence[int | None] | int | None
    ) -> None:
        super().__init__(layers=[])
        self.cache, self.windows = cache, windows
        self.attended = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged; the attention function stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because models that receive position ids do not use the cache's length."""
        return 0

    def attend(self, module: Any, heads: QKV, options: dict[str, Any]) -> torch.Tensor:
        """Store the new key and value [W, K, 1, D]; attend with the query [W, H, 1, D]."""
        from covey.accel.kernels.shared_prompt_attention import (  # needs Triton
            shared_prompt_attention,
        )

        layer, window = module.layer_idx, options.get("sliding_window")
        # A parity check of a few tokens would not show a wrong window, so it is checked here.
        expected = self.windows[layer] if isinstance(self.windows, list) else self.windows
        if window != expected:
            raise UnsupportedModel(f"layer {layer} has a window of {window} instead of {expected}")
        query, key, value = (states[:, :, 0] for states in heads)
        scaling = options.get("scaling")
        self.attended += 1
        return shared_prompt_attention(
            query,
            key,
            value,
            self.cache.layer(layer),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=options.get("softcap"),
        )[:, None]


def _windows(config: Any) -> list[int | None] | int | None:
    """Return the sliding window of each layer, or one window for all layers, from the config."""
    window: int | None = getattr(config, "sliding_window", None)
    types: list[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return window
    if others := sorted(set(types) - set(LAYER_TYPES)):
        raise UnsupportedModel(f"it has layers of type {others[0]}")
    return [window if kind == LAYER_TYPES[1] else None for kind in types]


@dataclass(frozen=True, slots=True)
class RecomputeDecoder(Decoder):
    """A decoder that runs the forward pass over all tokens so far, without a KV cache."""

    model: LanguageModel

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Append the new tokens and run the model on each slot's whole sequence."""
        slots = torch.arange(cache.width, device=tokens.device)
        place = cache.place[: cache.width]
        cache.tokens[slots, 0, place] = tokens
        # Causal models never read the padding, which is on the right, so no mask is needed.
        ids = cache.tokens[: cache.width, 0, : cache.reach]
        hidden: torch.Tensor = self.model.backbone(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[slots, place]
