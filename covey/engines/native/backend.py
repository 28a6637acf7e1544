"""The eager decode backend, and the choice of the fastest backend for a model.

The eager backend runs one decode step per call of `advance`, from Python. The backend in
decode_graph.py replays the CUDA graph of a decode step several times per call. The engine uses a
decoder only if the decoder's hidden states match the model's in a parity check (`checked_decoder`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from transformers import DynamicCache

from covey.accel.parity import FAILURES, FLOAT32_TOLERANCE, first_layers, matches
from covey.engines.native.kv_cache import KVCache, KVShape, SlotCache
from covey.engines.native.llama_decoder import Decoder, LlamaDecoder, UnsupportedModel
from covey.engines.native.prefill import cache_states
from covey.engines.native.sizes import CAPACITY_STEP, SPARE_BYTES, STEADY_ROWS
from covey.engines.native.slots import Progress, Slots
from covey.engines.native.transformers_decoder import RecomputeDecoder, TransformersDecoder
from covey.engines.protocol import Limits
from covey.errors import ModelError
from covey.models.adapter import perturbed_adapter
from covey.models.language_model import LanguageModel

# Settings for float8 numbers in the native engine.


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The parts of the native engine that use float8 instead of the model's dtype."""

    products: bool = False
    """Whether the linear layers multiply matrices in float8."""
    cache: bool = False
    """Whether the KV cache stores keys and values in float8."""

    @property
    def exact(self) -> bool:
        """Whether the engine avoids float8 entirely."""
        return not (self.products or self.cache)


MODEL_PRECISION = Precision()
"""The default: the engine computes in the model's dtype."""


class DecodeBackend(Protocol):
    """The interface of decode backends. A backend generates one completion in each slot."""

    description: str
    """A message for the user: the backend's name, and why no faster backend is used."""
    steps: int
    """Maximum number of tokens that one call of `advance` generates in a slot."""

    def width_for(self, completions: int) -> int:
        """Return the number of slots to allocate, at least one per concurrent completion."""

    def begin(self, limits: Limits, width: int) -> Slots:
        """Return `width` empty slots for requests within `limits`; read the current weights."""

    def refresh(self) -> None:
        """Switch to the model's current weights, which have changed since `begin`."""

    def advance(self, slots: Slots, width: int, most: int) -> Progress:
        """Generate 1 to `most` tokens in each unfinished slot with an index below `width`."""


@dataclass(slots=True)
class EagerBackend:
    """The eager backend, which generates one token per slot in each call of `advance`."""

    model: LanguageModel
    decoder: Decoder
    shape: KVShape | None
    """Shape of the KV cache. If the model has no KV cache, the shape is None and slots store token
    ids.
    """
    description: str = "one token at a time"
    steps: int = 1
    limits: Limits | None = field(init=False, default=None)
    """The limits that the last call of `begin` received."""
    spare: SlotCache | None = field(init=False, default=None)
    """A small KV cache on the CPU, kept for the next call because allocating memory is slow."""
    capacity: int = field(init=False, default=0)

    def width_for(self, completions: int) -> int:
        return completions

    def begin(self, limits: Limits, width: int) -> Slots:
        self.limits, sampling = limits, limits.sampling
        longest = limits.prompt_tokens + sampling.max_tokens
        capacity = -(-longest // CAPACITY_STEP) * CAPACITY_STEP
        if limits.steady:
            width = -(-width // STEADY_ROWS) * STEADY_ROWS
        cache = self.spare
        if cache is None or cache.slots != width or cache.capacity != capacity:
            cache = SlotCache(width, capacity, self.shape, self.model.device)
        self.spare, cache.steady = None, limits.steady
        if cache.place.device.type == "cpu" and cache.bytes <= SPARE_BYTES:
            self.spare = cache
        self.capacity = capacity
        self.refresh()
        return Slots.make(cache.emptied(), sampling, self.model.stop_ids)

    def refresh(self) -> None:
        self.decoder.begin(self.capacity)

    def advance(self, slots: Slots, width: int, most: int) -> Progress:
        cache = slots.cache
        assert self.limits is not None
        assert isinstance(cache, SlotCache)
        index = cache.active[:width].nonzero().flatten()
        if not len(index):
            return slots.progress(width)
        # The rounding of sums depends on the shapes of tensors. So the shapes are fixed (all slots,
        # at full length) if a completion must not depend on the others in the batch.
        steady = self.limits.steady
        cache.width = cache.slots if steady else width
        cache.reach = cache.capacity if steady else int(cache.place[:width].max()) + 1
        hidden = self.decoder.step(slots.last[: cache.width], cache)
        head = self.model.head
        logits = head.logits(hidden)[index] if steady else head.logits(hidden[index])
        slots.draw(index, logits, self.limits.sampling.distribution)
        return slots.progress(width)


def advance_by(
    step: Callable[[], object], slots: Slots, width: int, *, steps: int, most: int
) -> Progress:
    """Start min(steps, most) decode steps, without waiting for their results.

    The returned progress is the state before the last step, so that the CPU can look for ended
    completions while the device runs that step. If `steps` >= `most`, the returned progress is the
    state after the last step, because every completion has then reached its length limit.
    """
    one_more = steps < most
    for _ in range(min(steps, most) - one_more):
        step()
    progress = slots.progress(width, one_more=one_more)
    if one_more:
        step()
    return progress


@torch.inference_mode()
def choose_backend(model: LanguageModel, precision: Precision = MODEL_PRECISION) -> DecodeBackend:
    """Return the fastest backend that passes the parity check against the model.

    With float8 precision, raise ModelError if the CUDA graph backend does not support the model.
    """
    try:
        return _cached_backend(model, _kv_shape(model), precision)
    except UnsupportedModel as error:
        why = str(error)
    except FAILURES as error:
        why = first_error_line(error)
    if not precision.exact:
        raise ModelError(
            "model: engine.dtype or engine.kv_dtype = 'float8' does not work with this model, "
            f"because {why}; leave out both settings"
        )
    description = f"without a KV cache, which is slow, because {why}"
    return EagerBackend(model, RecomputeDecoder(model), None, description=description)


def _cached_backend(model: LanguageModel, shape: KVShape, precision: Precision) -> DecodeBackend:
    """Return the fastest backend with a KV cache; only the CUDA graph backend supports float8."""
    description = "one token at a time"
    if model.device.type == "cuda" or not precision.exact:
        from covey.engines.native.decode_graph import graph_backend  # needs triton

        try:
            return graph_backend(model, shape, precision)
        except UnsupportedModel as error:
            if not precision.exact:
                raise
            description += f", which is slow; no CUDA graphs, because {error}"
    decoder = decoder_for(model)
    description += "" if isinstance(decoder, LlamaDecoder) else ", by the model's own forward pass"
    return EagerBackend(model, decoder, shape, description=description)


def _kv_shape(model: LanguageModel) -> KVShape:
    prefix = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.backbone(input_ids=ids, past_key_values=prefix, use_cache=True)
    if not prefix.layers:
        raise UnsupportedModel("it keeps no keys and values")
    return KVShape.of(prefix)


# Parity check of decoders: finds the fastest decoder whose hidden states match the model's.
#
# The check runs two decode steps in three slots of different lengths, and compares them with the
# model's forward pass over all tokens at once, without a KV cache.

LENGTHS = [5, 2, 4]
"""Prompt lengths of the slots in the parity check."""
CAPACITY = 9

MakeCache = Callable[[int, KVShape], KVCache]


def _slot_cache(slots: int, shape: KVShape) -> SlotCache:
    return SlotCache(slots, CAPACITY, shape, shape.device)


def decoder_for(model: LanguageModel) -> Decoder:
    """Return the fastest decoder that uses a `SlotCache` and passes the parity check."""
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
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}" if lines[0] else type(error).__name__


def _float32_layers(model: LanguageModel) -> LanguageModel:
    """Return the model, or its first layers in float32 if it is a 16-bit model."""
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
    """Run two decode steps of `decoder` on top of cached prompts; return the hidden states."""
    ids, prompts = _tokens(model), DynamicCache()
    model.backbone(input_ids=ids, past_key_values=prompts, use_cache=True)
    cache = make_cache(3, KVShape.of(prompts))
    return _two_steps(ids, decoder, cache, cache_states(prompts))


@torch.inference_mode()
def decode_without_cache(model: LanguageModel) -> torch.Tensor:
    """Run two decode steps as full forward passes of the model; return the hidden states."""
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
