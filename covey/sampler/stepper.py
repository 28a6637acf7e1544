"""Who moves all slots on: one token at a time as Python runs, or several as a recorded graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import DynamicCache

from covey.policy.model import LanguageModel
from covey.sampler.decoder import Decoder, decoder_for
from covey.sampler.pick import pick_tokens
from covey.sampler.protocol import Sampling
from covey.sampler.slots import KeyShape, SlotCache, Slots

CAPACITY_STEP = 32
"""Slots hold a multiple of so many positions, so that one cache serves many calls."""
SPARE_BYTES = 64 * 2**20
"""The largest cache that is kept between calls."""


class Stepper(Protocol):
    """Moves slots on."""

    def width_for(self, answers: int) -> int:
        """Return how many slots to use for so many answers at a time; at least as many."""

    def begin(self, *, width: int, questions: int, longest: int, sampling: Sampling) -> Slots:
        """Return empty slots for the answers to so many questions, of at most `longest` tokens.

        From now on the weights are those of now.
        """

    def advance(self, slots: Slots, width: int) -> None:
        """Write one or more tokens in each of the first `width` slots that goes on."""


@dataclass(slots=True)
class EagerStepper:
    """One token a call."""

    model: LanguageModel
    decoder: Decoder
    shape: KeyShape
    sampling: Sampling | None = None
    spare: SlotCache | None = field(init=False, default=None)
    """A small cache on a CPU is kept for the next call: fresh memory is slow to touch."""

    def width_for(self, answers: int) -> int:
        """Any number of slots is as good as any other."""
        return answers

    def begin(self, *, width: int, questions: int, longest: int, sampling: Sampling) -> Slots:
        """Return empty slots."""
        capacity = -(-(longest + sampling.max_tokens) // CAPACITY_STEP) * CAPACITY_STEP
        cache = self.spare
        if cache is None or cache.slots != width or cache.capacity != capacity:
            cache = SlotCache(width, capacity, self.shape)
        self.spare = None
        if cache.place.device.type == "cpu" and cache.bytes <= SPARE_BYTES:
            self.spare = cache
        self.decoder.begin(capacity)
        self.sampling = sampling
        return Slots.make(cache.emptied(), sampling.max_tokens, self.model.stop_ids)

    def advance(self, slots: Slots, width: int) -> None:
        """Write one token in every slot that goes on."""
        assert self.sampling is not None
        cache = slots.cache
        assert isinstance(cache, SlotCache)
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
    prefix = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.backbone(input_ids=ids, past_key_values=prefix, use_cache=True)
    shape = KeyShape.of(prefix)
    if model.device.type == "cuda":
        from covey.sampler.graph import graph_stepper  # needs triton

        graph = graph_stepper(model, shape)
        if graph is not None:
            return graph
    return EagerStepper(model, decoder_for(model), shape)
