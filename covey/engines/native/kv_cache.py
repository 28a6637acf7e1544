"""Answers being written: fixed slots of key-value memory, and what is written in them.

transformers hands each layer's new keys and values to a `Cache` and attends to what it returns, so
a subclass that keeps slots of different lengths works with any model without touching its code.

Shapes: S slots, H key-value heads, L positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from transformers import Cache, DynamicCache

from covey.accel.attention import NAME
from covey.accel.packing import sent


class Memory(Protocol):
    """Keys and values of prompts and of the answers in slots."""

    place: torch.Tensor
    """[S]: where the next token of each slot is written."""
    active: torch.Tensor
    """[S]: whether the answer goes on."""

    @property
    def slots(self) -> int:
        """How many slots there are."""

    @property
    def spare_prompts(self) -> int:
        """How many prompts may be read before they are needed."""

    def emptied(self) -> Self:
        """Free all slots and forget all prompts."""

    def enter(self, slots: torch.Tensor, questions: Sequence[int]) -> None:
        """Put each slot behind its question's prompt."""

    def all_entered(self, question: int) -> None:
        """No other slot will need this question's prompt."""

    def all_ended(self, question: int) -> None:
        """All answers to this question have ended."""

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front."""


class KeyMemory(Memory, Protocol):
    """One that keeps keys and values of prompts as transformers reads them."""

    def remember(self, questions: Sequence[int], prompts: DynamicCache, lengths: list[int]) -> None:
        """Keep prompts that were read, row by row of `prompts`, under the numbers of questions."""


class SlotCache(Cache):  # type: ignore[misc] # transformers is untyped
    """Every slot holds its prompt and its answer, one behind the other, at its own length."""

    def __init__(self, slots: int, capacity: int, shape: KeyShape) -> None:
        super().__init__(layers=[])
        self.prompts: dict[int, tuple[DynamicCache, int, int]] = {}
        """By question: where it was read, in which row, and how long it is."""
        self.layer_keys = [shape.room(slots, capacity) for _ in range(shape.layers)]
        self.layer_values = [shape.room(slots, capacity) for _ in range(shape.layers)]
        self.width = slots
        """Slots 0 to width - 1 take part in the next step."""
        self.place = torch.zeros(slots, dtype=torch.long, device=shape.device)
        """[S]: where the next token of each slot is written."""
        self.active = torch.zeros(slots, dtype=torch.bool, device=shape.device)
        """[S]: whether the answer goes on."""
        self.reach = 0
        """Positions that the next step looks at: one more than the largest place in use."""

    @property
    def slots(self) -> int:
        """How many slots there are in all."""
        return len(self.place)

    @property
    def spare_prompts(self) -> int:
        """None: until it is copied, a prompt takes memory beside the slots."""
        return 0

    @property
    def capacity(self) -> int:
        """The most positions a slot can hold."""
        return self.layer_keys[0].shape[2]

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(t.nbytes for t in (*self.layer_keys, *self.layer_values))

    def emptied(self) -> SlotCache:
        """Free all slots."""
        # What is masked is multiplied by 0, and what a call that failed has left may be NaN.
        for tensor in (*self.layer_keys, *self.layer_values):
            tensor.zero_()
        self.width, self.reach = self.slots, 0
        self.prompts.clear()
        self.place.zero_()
        self.active.zero_()
        return self

    def remember(self, questions: Sequence[int], prompts: DynamicCache, lengths: list[int]) -> None:
        """Keep prompts as they were read."""
        for row, (question, length) in enumerate(zip(questions, lengths, strict=True)):
            self.prompts[question] = prompts, row, length

    def enter(self, slots: torch.Tensor, questions: Sequence[int]) -> None:
        """Copy each question's prompt into its slot."""
        mine = [self.prompts[question] for question in questions]
        for read in {id(cache): cache for cache, _, _ in mine}.values():
            picked = [i for i, (cache, _, _) in enumerate(mine) if cache is read]
            rows = torch.tensor([mine[i][1] for i in picked], device=slots.device)
            self._copy(slots[picked], read, rows)
        # Writing a token moves the place on by one, to where that token goes.
        lengths = torch.tensor([length for _, _, length in mine], device=slots.device)
        self.place[slots] = lengths - 1

    def _copy(self, slots: torch.Tensor, prompts: DynamicCache, rows: torch.Tensor) -> None:
        for keys, values, layer in zip(
            self.layer_keys, self.layer_values, prompts.layers, strict=True
        ):
            length = layer.keys.shape[2]
            keys[slots, :, :length] = layer.keys[rows]
            values[slots, :, :length] = layer.values[rows]

    def all_entered(self, question: int) -> None:
        """Forget the prompt: every slot has a copy."""
        del self.prompts[question]

    def all_ended(self, question: int) -> None:
        """There is nothing left to forget."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new position per slot and return all that may be attended to."""
        keys = self.layer_keys[layer_idx][: self.width]
        values = self.layer_values[layer_idx][: self.width]
        slots = torch.arange(self.width, device=keys.device)
        keys[slots, :, self.place[: self.width]] = key_states[:, :, 0]
        values[slots, :, self.place[: self.width]] = value_states[:, :, 0]
        return keys[:, :, : self.reach], values[:, :, : self.reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many positions exist; models that are told positions do not ask."""
        return self.reach

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front and shrink to them."""
        for tensors in (self.layer_keys, self.layer_values):
            for tensor in tensors:
                tensor[: len(slots)] = tensor[slots]
        self.place[: len(slots)] = self.place[slots]
        self.active[: len(slots)] = self.active[slots]
        self.active[len(slots) :] = False
        self.width = len(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What is being written. Row s of every tensor is slot s; R is the longest answer."""

    cache: Memory
    uniforms: torch.Tensor
    """[S, R]."""
    tokens: torch.Tensor
    """[S, R]."""
    logps: torch.Tensor
    """[S, R]."""
    last: torch.Tensor
    """[S]: the newest token."""
    count: torch.Tensor
    """[S]: tokens written so far."""
    stop_ids: torch.Tensor
    """Tokens that end an answer."""

    @staticmethod
    def make(cache: Memory, room: int, stop_ids: Sequence[int]) -> Slots:
        """Give a cache's slots room for answers."""
        device, slots = cache.place.device, cache.slots
        return Slots(
            cache=cache,
            uniforms=torch.zeros(slots, room, device=device),
            tokens=torch.zeros(slots, room, dtype=torch.long, device=device),
            logps=torch.zeros(slots, room, device=device),
            last=torch.zeros(slots, dtype=torch.long, device=device),
            count=torch.zeros(slots, dtype=torch.long, device=device),
            stop_ids=torch.tensor(stop_ids, device=device),
        )

    @property
    def room(self) -> int:
        """The longest answer."""
        return self.tokens.shape[1]

    def open(self, index: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Make slots ready for new answers, whose tokens these uniforms [n, R] decide."""
        self.uniforms[index] = uniforms
        self.count.index_fill_(0, index, 0)  # an assignment would wait for the device

    def close(self, slots: list[int]) -> None:
        """End answers from outside."""
        if slots:
            self.cache.active[torch.tensor(slots, device=self.count.device)] = False

    def write(self, index: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Write the next token of the slots `index`. A stop token ends an answer, so does R."""
        count = self.count[index]
        self.tokens[index, count] = tokens
        self.logps[index, count] = logps
        self.last[index] = tokens
        self.count[index] = count + 1
        self.cache.place[index] += 1
        ended = torch.isin(tokens, self.stop_ids) | (count + 1 == self.room)
        self.cache.active[index] = ~ended

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front."""
        self.cache.keep(slots)
        for tensor in (self.uniforms, self.tokens, self.logps, self.last, self.count):
            tensor[: len(slots)] = tensor[slots]

    def progress(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which slots go on, and how many tokens each has; this waits for the device."""
        both = torch.stack([self.cache.active[:width].long(), self.count[:width]]).cpu().numpy()
        return both[0].astype(bool), both[1]

    def written(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and log-probabilities [n, R] of some slots, in main memory."""
        (index,) = sent([torch.tensor(slots)], self.count.device)
        # In one piece: each thing that is asked of a device is another time to wait for it.
        both = torch.stack([self.tokens[index].int(), self.logps[index].view(torch.int32)])
        tokens, logps = both.cpu().numpy()
        return tokens, logps.view(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """What keys and values look like in a model."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(prefix: DynamicCache) -> KeyShape:
        """Read it off a prompt's keys."""
        keys = prefix.layers[0].keys
        return KeyShape(
            layers=len(prefix.layers),
            heads=keys.shape[1],
            size=keys.shape[3],
            dtype=keys.dtype,
            device=keys.device,
        )

    def room(self, slots: int, capacity: int) -> torch.Tensor:
        """Return [S, H, L, D] of zeros."""
        return torch.zeros(
            slots, self.heads, capacity, self.size, dtype=self.dtype, device=self.device
        )


def attention_mask(model_config: Any, place: torch.Tensor, reach: int, dtype: torch.dtype) -> Any:
    """Return the mask [S, 1, 1, reach] that lets each slot see its own positions and no more.

    Models with sliding-window layers get one mask per kind of layer.
    """
    positions = torch.arange(reach, device=place.device)
    seen = positions <= place[:, None]
    kinds = set(getattr(model_config, "layer_types", None) or ())
    window = getattr(model_config, "sliding_window", None)
    masks = {"full_attention": seen}
    if window:
        masks["sliding_attention"] = seen & (positions > place[:, None] - window)
    shaped = {
        kind: _as_bias(mask[:, None, None], model_config, dtype) for kind, mask in masks.items()
    }
    if "sliding_attention" in kinds:
        return shaped
    # Without a list of layer types, a model that has a window uses it in every layer.
    return shaped["sliding_attention" if window and not kinds else "full_attention"]


def _as_bias(mask: torch.Tensor, model_config: Any, dtype: torch.dtype) -> torch.Tensor:
    if model_config._attn_implementation in ("sdpa", NAME):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
