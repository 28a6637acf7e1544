"""Who moves all slots on: one token at a time as Python runs, or several as a recorded graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import DynamicCache

from covey.engines.draw import pick_tokens
from covey.engines.native.choose_backend import FAILURES, decoder_for, first_line
from covey.engines.native.kv_cache import KeyShape, SlotCache, Slots
from covey.engines.native.llama_decoder import Decoder, LlamaDecoder, NotUnderstood
from covey.engines.native.transformers_decoder import RereadingDecoder, TokenMemory
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel

CAPACITY_STEP = 32
"""Slots hold a multiple of so many positions, so that one cache serves many calls."""
SPARE_BYTES = 64 * 2**20
"""The largest cache that is kept between calls."""


class Stepper(Protocol):
    """Moves slots on."""

    way: str
    """How, and why not faster, in one line for the user."""

    def width_for(self, answers: int) -> int:
        """Return how many slots to use for so many answers at a time; at least as many."""

    def begin(self, *, width: int, questions: int, longest: int, sampling: Sampling) -> Slots:
        """Return empty slots for the answers to so many questions, of at most `longest` tokens.

        From now on the weights are those of now.
        """

    def advance(self, slots: Slots, width: int, most: int) -> None:
        """Write 1 to `most` tokens in each of the first `width` slots that goes on."""


@dataclass(slots=True)
class EagerStepper:
    """One token a call."""

    model: LanguageModel
    decoder: Decoder
    shape: KeyShape | None
    """None: the model has no keys that could be kept, and slots hold tokens."""
    way: str = "one token at a time"
    sampling: Sampling | None = None
    spare: SlotCache | TokenMemory | None = field(init=False, default=None)
    """A small cache on a CPU is kept for the next call: fresh memory is slow to touch."""

    def width_for(self, answers: int) -> int:
        """Any number of slots is as good as any other."""
        return answers

    def begin(self, *, width: int, questions: int, longest: int, sampling: Sampling) -> Slots:
        """Return empty slots."""
        capacity = -(-(longest + sampling.max_tokens) // CAPACITY_STEP) * CAPACITY_STEP
        cache = self.spare
        if cache is None or cache.slots != width or cache.capacity != capacity:
            cache = self._memory(width, capacity)
        self.spare = None
        if cache.place.device.type == "cpu" and cache.bytes <= SPARE_BYTES:
            self.spare = cache
        self.decoder.begin(capacity)
        self.sampling = sampling
        return Slots.make(cache.emptied(), sampling.max_tokens, self.model.stop_ids)

    def _memory(self, width: int, capacity: int) -> SlotCache | TokenMemory:
        if self.shape is None:
            return TokenMemory(width, capacity, self.model.device)
        return SlotCache(width, capacity, self.shape)

    def advance(self, slots: Slots, width: int, most: int) -> None:
        """Write one token in every slot that goes on."""
        assert self.sampling is not None
        cache = slots.cache
        assert isinstance(cache, SlotCache | TokenMemory)
        index = cache.active[:width].nonzero().flatten()
        if not len(index):
            return
        cache.width = width
        cache.reach = int(cache.place[:width].max()) + 1
        hidden = self.decoder.step(slots.last[:width], cache)
        logits = self.model.head.logits(hidden[index])
        uniforms = slots.uniforms[index, slots.count[index]]
        tokens, logps = pick_tokens(logits, uniforms, self.sampling.distribution)
        slots.write(index, tokens, logps)


@torch.inference_mode()
def stepper_for(model: LanguageModel) -> Stepper:
    """Return the fastest stepper that says what the model says."""
    try:
        return _by_keys(model, _key_shape(model))
    except NotUnderstood as error:
        why = str(error)
    except FAILURES as error:
        why = first_line(error)
    way = f"all is read again for every token, which is slow, because {why}"
    return EagerStepper(model, RereadingDecoder(model), None, way=way)


def _by_keys(model: LanguageModel, shape: KeyShape) -> Stepper:
    """Return the fastest stepper that goes on from keys and values."""
    way = "one token at a time"
    if model.device.type == "cuda":
        from covey.engines.native.decode_graph import graph_stepper  # needs triton

        try:
            return graph_stepper(model, shape)
        except NotUnderstood as error:
            way += f", which is slow; no recorded graphs, because {error}"
    decoder = decoder_for(model)
    way += "" if isinstance(decoder, LlamaDecoder) else ", by the model's own forward pass"
    return EagerStepper(model, decoder, shape, way=way)


def _key_shape(model: LanguageModel) -> KeyShape:
    prefix = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.backbone(input_ids=ids, past_key_values=prefix, use_cache=True)
    if not prefix.layers:
        raise NotUnderstood("it keeps no keys and values")
    return KeyShape.of(prefix)
