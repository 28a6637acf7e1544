"""Key-value memory in fixed slots, one per answer being written.

transformers hands each layer's new keys and values to a `Cache` and attends to what it returns, so
a subclass that keeps slots of different lengths works with any model without touching its code.

Shapes: S slots, H key-value heads, L positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache

from covey.policy.attention import NAME


class SlotCache(Cache):  # type: ignore[misc] # transformers is untyped
    """Keys and values of every slot; each slot has its own length."""

    def __init__(self, slots: int, capacity: int, prefix: DynamicCache) -> None:
        super().__init__(layers=[])
        self.layer_keys = [_room(layer.keys, slots, capacity) for layer in prefix.layers]
        self.layer_values = [_room(layer.values, slots, capacity) for layer in prefix.layers]
        self.width = slots
        """Slots 0 to width - 1 take part in the next step."""
        self.place = torch.zeros(slots, dtype=torch.long, device=self.layer_keys[0].device)
        """[S]: where the next token of each slot is written."""
        self.reach = 0
        """Positions that the next step looks at: one more than the largest place in use."""

    @property
    def slots(self) -> int:
        """How many slots there are in all."""
        return len(self.place)

    @property
    def capacity(self) -> int:
        """The most positions a slot can hold."""
        return self.layer_keys[0].shape[2]

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(t.nbytes for t in (*self.layer_keys, *self.layer_values))

    def emptied(self) -> SlotCache:
        """Free all slots. Old keys may stay: what is not written yet is not looked at."""
        self.width, self.reach = self.slots, 0
        self.place.zero_()
        return self

    def write_prefix(self, slots: torch.Tensor, prefix: DynamicCache, rows: torch.Tensor) -> None:
        """Copy the keys and values of already computed prompts into slots."""
        for keys, values, layer in zip(
            self.layer_keys, self.layer_values, prefix.layers, strict=True
        ):
            length = layer.keys.shape[2]
            keys[slots, :, :length] = layer.keys[rows]
            values[slots, :, :length] = layer.values[rows]

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
        self.width = len(slots)


def _room(like: torch.Tensor, slots: int, capacity: int) -> torch.Tensor:
    return like.new_zeros(slots, like.shape[1], capacity, like.shape[3])


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
