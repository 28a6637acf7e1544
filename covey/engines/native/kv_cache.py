"""KV cache of the native engine: each slot stores one completion.

`KVCache` is the interface that the scheduler uses. `SlotCache`, in this module, stores prompt and
completion together in a slot; the cache in shared_prompt_cache.py stores a prompt once for its
whole group.

transformers passes each layer's new keys and values to a `Cache`, and attends to the keys and
values that the `Cache` returns. Because `SlotCache` is a subclass of `Cache`, it works with any
model without changes to the model's code, and its slots may have different lengths.

In tensor shapes, S stands for slots, H for key-value heads, L for positions and D for the head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from transformers import Cache, DynamicCache

from covey.accel.attention import NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape, dtype and device of a model's keys and values."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device
    float8: bool = False
    """Whether the KV cache stores keys and values as float8 numbers."""

    @staticmethod
    def of(prefix: DynamicCache) -> KVShape:
        """Read the shape of keys and values from a filled transformers cache."""
        keys = prefix.layers[0].keys
        return KVShape(
            layers=len(prefix.layers),
            heads=keys.shape[1],
            size=keys.shape[3],
            dtype=keys.dtype,
            device=keys.device,
        )

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which keys and values are stored."""
        return torch.float8_e4m3fn if self.float8 else self.dtype

    def bytes(self, positions: int) -> int:
        """Return the memory that the keys and values of `positions` tokens take, in bytes."""
        return 2 * self.layers * self.heads * self.size * self.stored.itemsize * positions

    def zeros(self, slots: int, capacity: int) -> list[torch.Tensor]:
        """Return a tensor of zeros [S, H, L, D] for each layer."""
        return [
            torch.zeros(
                slots, self.heads, capacity, self.size, dtype=self.stored, device=self.device
            )
            for _ in range(self.layers)
        ]


class KVCache:
    """Base class of KV caches, which store prompts and one completion per slot.

    The scheduler chooses the id of each stored prompt.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.place = torch.zeros(slots, dtype=torch.long, device=device)
        """[S]: the position at which each slot's next token is written."""
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        """[S]: whether each slot's completion is unfinished."""
        self.per_slot = [self.place, self.active]
        """All tensors that have one row per slot."""

    @property
    def slots(self) -> int:
        return len(self.place)

    @property
    def spare_prompts(self) -> int:
        """Number of prompts that can be stored in advance, before a slot uses them."""
        return 0

    def emptied(self) -> Self:
        """Free all slots and remove all prompts."""
        raise NotImplementedError

    def store(self, prompts: Sequence[int], states: list[torch.Tensor], lengths: list[int]) -> None:
        """Store prompts after their prefill; row i of every tensor in `states` is for `prompts[i]`.

        `states` are keys and values [prompts, H, L, D], layer by layer.
        """
        raise NotImplementedError

    def enter(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """Assign a prompt to each of the given slots."""
        raise NotImplementedError

    def reserve(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Reserve memory for `positions[i]` tokens in `slots[i]`; return whether this succeeded."""
        return True

    def admits(self, positions: np.ndarray) -> int:
        """Return how many more completions fit into the cache.

        Completion i needs space for `positions[i]` tokens.
        """
        return len(positions)

    def store_completions(
        self, slots: list[int], counts: list[int], rows: torch.Tensor, layers: list[torch.Tensor]
    ) -> None:
        """Store keys and values of paused completions, with `counts[i]` positions in `slots[i]`.

        `layers` are keys and values [tokens, H, D], layer by layer. `rows` contains the index in
        `layers` of each token to store, slot after slot.
        """
        raise NotImplementedError

    def leave(self, slots: Sequence[int]) -> None:
        """Record that the completions in the given slots have ended or are paused."""

    def all_entered(self, prompt: int) -> None:
        """Record that no further slot will need the prompt."""

    def all_ended(self, prompt: int) -> None:
        """Record that all completions of a prompt have ended."""

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and free the other slots."""
        index = torch.tensor(slots, device=self.place.device)
        for tensor in self.per_slot:
            tensor[: len(slots)] = tensor[index]
        self.active[len(slots) :] = False


class SlotCache(KVCache, Cache):  # type: ignore[misc] # transformers is untyped
    """A cache whose slots store a prompt followed by a completion.

    For models without keys and values (`shape` is None), the cache stores token ids instead.
    """

    def __init__(
        self, slots: int, capacity: int, shape: KVShape | None, device: torch.device
    ) -> None:
        Cache.__init__(self, layers=[])
        KVCache.__init__(self, slots, device)
        self.prompts: dict[int, tuple[list[torch.Tensor], int, int]] = {}
        """Maps a prompt id to the prompt's tensors, its row in these tensors, and its token count.
        """
        self.layer_keys = [] if shape is None else shape.zeros(slots, capacity)
        self.layer_values = [] if shape is None else shape.zeros(slots, capacity)
        rows = slots if shape is None else 0
        self.tokens = torch.zeros(rows, 1, capacity, dtype=torch.long, device=device)
        """Token ids [S, 1, L] for models without keys and values; otherwise empty."""
        layers = zip(self.layer_keys, self.layer_values, strict=True)
        self.stored = [tensor for layer in layers for tensor in layer] or [self.tokens]
        self.per_slot += self.stored
        self.capacity = capacity
        """The number of token positions of a slot."""
        self.width = slots
        """Number of slots, counted from slot 0, that the next decode step processes."""
        self.reach = 0
        """Number of positions that the next decode step reads, at least max(place) + 1."""
        self.steady = False
        """Whether the rounding of a slot must not depend on the slot's number and other slots."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)

    def emptied(self) -> Self:
        # A failed call may have left NaN. Attention multiplies masked values by 0, and 0 * NaN is
        # NaN.
        for tensor in self.stored:
            tensor.zero_()
        self.width, self.reach = self.slots, 0
        self.prompts.clear()
        self.place.zero_()
        self.active.zero_()
        return self

    def store(self, prompts: Sequence[int], states: list[torch.Tensor], lengths: list[int]) -> None:
        """Keep references to the keys and values of prefilled prompts."""
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self.prompts[prompt] = states, row, length

    def enter(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        mine = [self.prompts[prompt] for prompt in prompts]
        index = torch.tensor(slots, device=self.place.device)
        for states in {id(states): states for states, _, _ in mine}.values():
            picked = [i for i, (other, _, _) in enumerate(mine) if other is states]
            rows = torch.tensor([mine[i][1] for i in picked], device=index.device)
            for target, source in zip(self.stored, states, strict=True):
                target[index[picked], :, : source.shape[2]] = source[rows]
        # Writing a token first increments `place`, and then writes at the new `place`.
        lengths = torch.tensor([length for _, _, length in mine], device=index.device)
        self.place[index] = lengths - 1

    def all_entered(self, prompt: int) -> None:
        """Remove the stored prompt, because every slot that needs it has a copy."""
        del self.prompts[prompt]

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0; the next decode steps process only these slots."""
        super().keep(slots)
        self.width = len(slots)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new key and value of each slot; return all keys and values for attention."""
        keys = self.layer_keys[layer_idx][: self.width]
        values = self.layer_values[layer_idx][: self.width]
        slots = torch.arange(self.width, device=keys.device)
        keys[slots, :, self.place[: self.width]] = key_states[:, :, 0]
        values[slots, :, self.place[: self.width]] = value_states[:, :, 0]
        return keys[:, :, : self.reach], values[:, :, : self.reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that attention reads, for models without position ids."""
        return self.reach


def attention_mask(model_config: Any, place: torch.Tensor, reach: int, dtype: torch.dtype) -> Any:
    """Return the mask [S, 1, 1, reach] that lets each slot attend only to its own positions.

    Models with sliding-window layers get a dictionary with one mask per layer type.
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
    # A model with a window but without a list of layer types uses the window in every layer.
    return shaped["sliding_attention" if window and not kinds else "full_attention"]


def _as_bias(mask: torch.Tensor, model_config: Any, dtype: torch.dtype) -> torch.Tensor:
    if model_config._attn_implementation in ("sdpa", NAME):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
