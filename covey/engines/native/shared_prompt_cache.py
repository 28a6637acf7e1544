"""KV cache for CUDA graphs, which stores each prompt once for its group of completions.

The cache's tensors keep their addresses, so a captured graph stays valid. Storing a prompt once
saves memory. Slots that share a prompt read the prompt mostly from the GPU's L2 cache.

Tensor shapes use P prompts, S slots, K key-value heads, C positions and head size D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch

from covey.accel.packing import row_of_each, to_device
from covey.engines.native.kv_cache import KVCache, KVShape

if TYPE_CHECKING:
    from covey.accel.kernels.decode_attention import LayerCache

PROMPT_STEP = 128
"""The capacity for prompt tokens is a multiple of this, so that calls can share a cache."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Slot counts for which graphs are captured; larger counts are multiples of the last count."""


def width_for(completions: int) -> int:
    """Round a number of completions up to a slot count for which a graph is captured."""
    if completions > WIDTHS[-1]:
        return -(-completions // WIDTHS[-1]) * WIDTHS[-1]
    return next(width for width in WIDTHS if width >= completions)


class SharedPromptCache(KVCache):
    """A KV cache with separate tensors for prompts and for completions."""

    def __init__(
        self, *, slots: int, capacity: int, prompts: int, prompt_capacity: int, shape: KVShape
    ) -> None:
        super().__init__(slots, shape.device)
        self.prompt_keys = shape.zeros(prompts, prompt_capacity)
        self.prompt_values = shape.zeros(prompts, prompt_capacity)
        self.layer_keys = shape.zeros(slots, capacity)
        self.layer_values = shape.zeros(slots, capacity)
        self.prompt_row, self.prompt_length = (torch.zeros_like(self.place) for _ in range(2))
        """[S]: the cache row of each slot's prompt, and the prompt's length."""
        self.per_slot += [self.prompt_row, self.prompt_length]
        self.per_slot += [*self.layer_keys, *self.layer_values]
        self.rows: dict[int, tuple[int, int]] = {}
        """Prompt id -> row of the prompt in the cache, and its length."""
        self.free = list(range(prompts))

    @property
    def spare_prompts(self) -> int:
        """Number of free prompt rows."""
        return len(self.free)

    def holds(self, *, slots: int, capacity: int, prompts: int, prompt_capacity: int) -> bool:
        """Return whether the cache is large enough for the given sizes."""
        rows, _, room, _ = self.prompt_keys[0].shape
        return (
            self.slots >= slots
            and self.layer_keys[0].shape[2] >= capacity
            and rows >= prompts
            and room >= prompt_capacity
        )

    def emptied(self) -> Self:
        """Free all slots and prompt rows."""
        self.free = list(range(len(self.prompt_keys[0])))
        self.rows.clear()
        self.active.zero_()
        return self

    def store(self, prompts: Sequence[int], states: list[torch.Tensor], lengths: list[int]) -> None:
        """Copy prompts to free rows of the cache."""
        index = torch.tensor(self._rows_for(prompts, lengths), device=self.place.device)
        for target, source in zip(self._prompt_tensors(), states, strict=True):
            target[index, :, : source.shape[2]] = source

    def store_packed(
        self,
        prompts: Sequence[int],
        lengths: list[int],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy prompts to free rows; `layers` are packed keys and values [tokens, K, D]."""
        counts = torch.tensor(lengths)
        which = row_of_each(counts)
        row = torch.tensor(self._rows_for(prompts, lengths))[which]
        at = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        row, at = to_device([row, at], self.place.device)
        for target, source in zip(
            self._prompt_tensors(), (part for layer in layers for part in layer), strict=True
        ):
            target[row, :, at] = source

    def _prompt_tensors(self) -> list[torch.Tensor]:
        layers = zip(self.prompt_keys, self.prompt_values, strict=True)
        return [tensor for layer in layers for tensor in layer]

    def layer(self, number: int) -> LayerCache:
        """Return the tensors of one layer as an argument for the kernels."""
        from covey.accel.kernels.decode_attention import LayerCache  # needs Triton

        return LayerCache(
            self.prompt_keys[number],
            self.prompt_values[number],
            self.prompt_row,
            self.prompt_length,
            self.layer_keys[number],
            self.layer_values[number],
            self.place,
            self.active,
        )

    def _rows_for(self, prompts: Sequence[int], lengths: list[int]) -> list[int]:
        rows = [self.free.pop() for _ in prompts]
        self.rows |= dict(zip(prompts, zip(rows, lengths, strict=True), strict=True))
        return rows

    def enter(self, slots: torch.Tensor, prompts: Sequence[int]) -> None:
        """Set the prompt row of each slot."""
        mine = to_device([torch.tensor([self.rows[p] for p in prompts])], slots.device)[0]
        self.prompt_row[slots], self.prompt_length[slots] = mine.unbind(1)
        # Writing a token first increments `place`, and then writes at the new `place`.
        self.place.index_fill_(0, slots, -1)

    def all_ended(self, prompt: int) -> None:
        """Free the cache row of a prompt."""
        self.free.append(self.rows.pop(prompt)[0])
