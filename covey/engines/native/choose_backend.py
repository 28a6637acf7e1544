"""Which decoder a model gets: the fastest that says what the model itself says of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

from covey.accel.parity import first_layers, near
from covey.engines.native.kv_cache import KeyMemory, KeyShape, SlotCache
from covey.engines.native.llama_decoder import Decoder, LlamaDecoder, NotUnderstood
from covey.engines.native.transformers_decoder import (
    RereadingDecoder,
    TokenMemory,
    TransformersDecoder,
)
from covey.models.adapter import stirred
from covey.models.language_model import LanguageModel

FAILURES: tuple[type[Exception], ...] = (
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
)
"""What a model of another shape may raise when it is taken for one that is understood."""
try:
    from triton.errors import TritonError
except ImportError:  # then there are no kernels that could fail to compile
    pass
else:
    FAILURES = (*FAILURES, TritonError)

LENGTHS = [5, 2, 4]
"""Of the prompts of a trial."""

MakeMemory = Callable[[int, KeyShape], KeyMemory]


def decoder_for(model: LanguageModel) -> Decoder:
    """Return the fastest decoder that goes on from keys and values and says what the model says."""
    try:
        return tried(model, LlamaDecoder)
    except NotUnderstood:
        return tried(model, TransformersDecoder)


def tried(
    model: LanguageModel,
    kind: Callable[[LanguageModel], Decoder],
    memory: MakeMemory | None = None,
) -> Decoder:
    """Return a decoder of some kind if it says of a trial what the model says.

    Otherwise raises NotUnderstood.
    """
    try:
        decoder = kind(model)
        with stirred(model):
            small = _for_trial(model)
            expected, got = reread(small), trial(small, kind(small), memory)
    except FAILURES as error:
        raise NotUnderstood(f"a trial of it failed ({first_line(error)})") from error
    if not near(got, expected):
        raise NotUnderstood("a trial of it gave other numbers than the model itself")
    return decoder


def first_line(error: Exception) -> str:
    """Say in short what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}" if lines[0] else type(error).__name__


def _for_trial(model: LanguageModel) -> LanguageModel:
    """Return a model as it is, or of one that rounds much the first layers, in float32."""
    if model.head.linear.weight.dtype in (torch.float32, torch.float64):
        return model
    few = SimpleNamespace(base_model=first_layers(model.backbone), config=model.model.config)
    return replace(model, model=few)


def _slot_cache(slots: int, shape: KeyShape) -> SlotCache:
    return SlotCache(slots, 9, shape)


def _tokens(model: LanguageModel) -> torch.Tensor:
    vocabulary: int = model.model.config.vocab_size
    return torch.arange(2, 17, device=model.device).view(3, 5) % vocabulary


@torch.inference_mode()
def trial(model: LanguageModel, decoder: Decoder, memory: MakeMemory | None = None) -> torch.Tensor:
    """Decode two tokens in three slots of different length."""
    ids, prompts = _tokens(model), DynamicCache()
    model.backbone(input_ids=ids, past_key_values=prompts, use_cache=True)
    cache = (memory or _slot_cache)(3, KeyShape.of(prompts))
    cache.remember([0, 1, 2], prompts, LENGTHS)
    return _two_steps(ids, decoder, cache)


@torch.inference_mode()
def reread(model: LanguageModel) -> torch.Tensor:
    """Do the same without keys and values: what the model says of all tokens at once."""
    ids = _tokens(model)
    cache = TokenMemory(3, 9, model.device)
    rows = [tuple(row[:length]) for row, length in zip(ids.tolist(), LENGTHS, strict=True)]
    cache.remember_tokens([0, 1, 2], rows)
    return _two_steps(ids, RereadingDecoder(model), cache)


def _two_steps(ids: torch.Tensor, decoder: Decoder, cache: Any) -> torch.Tensor:
    cache.enter(torch.arange(3, device=ids.device), [0, 1, 2])
    cache.active[:] = True
    decoder.begin(9)
    states: list[torch.Tensor] = []
    for _ in range(2):
        cache.place += 1
        cache.reach = int(cache.place.max()) + 1
        states.append(decoder.step(ids[:, len(states)], cache))
    return torch.stack(states)
