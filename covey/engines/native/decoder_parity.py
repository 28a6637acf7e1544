"""Parity check of decoders: finds the fastest decoder whose hidden states match the model's.

The check runs two decode steps in three slots of different lengths. The decoder is compared with
the model's forward pass over all tokens at once, without a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from transformers import DynamicCache

from covey.accel.parity import FAILURES, FLOAT32_TOLERANCE, first_layers, matches
from covey.engines.native.kv_cache import KVCache, KVShape, SlotCache
from covey.engines.native.llama_decoder import Decoder, LlamaDecoder, UnsupportedModel
from covey.engines.native.prefill import cache_states
from covey.engines.native.transformers_decoder import RecomputeDecoder, TransformersDecoder
from covey.models.adapter import perturbed_adapter
from covey.models.language_model import LanguageModel

LENGTHS = [5, 2, 4]
"""Prompt lengths of the slots in the parity check."""
CAPACITY = 9

MakeCache = Callable[[int, KVShape], KVCache]


def _slot_cache(slots: int, shape: KVShape) -> SlotCache:
    return SlotCache(slots, CAPACITY, shape, shape.device)


def decoder_for(model: LanguageModel) -> Decoder:
    """Return the fastest decoder over a `SlotCache` that passes the parity check."""
    try:
        return checked_decoder(model, LlamaDecoder)
    except UnsupportedModel:
        return checked_decoder(model, TransformersDecoder)


def checked_decoder(
    model: LanguageModel,
    kind: Callable[[LanguageModel], Decoder],
    make_cache: MakeCache = _slot_cache,
    tolerance: float = FLOAT32_TOLERANCE,
) -> Decoder:
    """Return a decoder of the class `kind`; raise UnsupportedModel if it fails the parity check."""
    try:
        decoder = kind(model)
        with perturbed_adapter(model):
            small = _float32_layers(model)
            expected = decode_without_cache(small)
            got = decode_with_cache(small, kind(small), make_cache)
    except FAILURES as error:
        raise UnsupportedModel(f"its parity check failed ({first_error_line(error)})") from error
    if not matches(got, expected, tolerance):
        raise UnsupportedModel("its parity check gave numbers that differ from the model's")
    return decoder


def first_error_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}" if lines[0] else type(error).__name__


def _float32_layers(model: LanguageModel) -> LanguageModel:
    """Return the model itself, or the first layers of a 16-bit model in float32."""
    if model.head.linear.weight.dtype in (torch.float32, torch.float64):
        return model
    few = SimpleNamespace(base_model=first_layers(model.backbone), config=model.model.config)
    return replace(model, model=few)


def _tokens(model: LanguageModel) -> torch.Tensor:
    vocabulary: int = model.model.config.vocab_size
    return torch.arange(2, 17, device=model.device).view(3, 5) % vocabulary


@torch.inference_mode()
def decode_with_cache(
    model: LanguageModel, decoder: Decoder, make_cache: MakeCache = _slot_cache
) -> torch.Tensor:
    """Return the hidden states of two decode steps after cached prompts."""
    ids, prompts = _tokens(model), DynamicCache()
    model.backbone(input_ids=ids, past_key_values=prompts, use_cache=True)
    cache = make_cache(3, KVShape.of(prompts))
    return _two_steps(ids, decoder, cache, cache_states(prompts))


@torch.inference_mode()
def decode_without_cache(model: LanguageModel) -> torch.Tensor:
    """Return the hidden states of the two decode steps from the model's own forward pass."""
    ids = _tokens(model)
    cache = SlotCache(3, CAPACITY, None, model.device)
    return _two_steps(ids, RecomputeDecoder(model), cache, [ids[:, None]])


def _two_steps(
    ids: torch.Tensor, decoder: Decoder, cache: KVCache, states: list[torch.Tensor]
) -> torch.Tensor:
    cache.store([0, 1, 2], states, LENGTHS)
    cache.enter([0, 1, 2], [0, 1, 2])
    cache.reserve(np.arange(3), np.full(3, 2))
    cache.active[:] = True
    decoder.begin(CAPACITY)
    hidden: list[torch.Tensor] = []
    for _ in range(2):
        cache.place += 1
        if isinstance(cache, SlotCache):
            cache.reach = int(cache.place.max()) + 1
        hidden.append(decoder.step(ids[:, len(hidden)], cache))
    return torch.stack(hidden)
