"""Key-value memory for a GPU: prompts in rows that their whole group reads, answers in slots.

Nothing of it ever moves, so that a recorded graph keeps finding it. A prompt is stored once, which
saves memory, and the slots that share it read it mostly from the chip's own cache.

Shapes: P prompts, S slots, K key-value heads, C positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from transformers import DynamicCache

from covey.accel.packing import row_of_each, sent
from covey.engines.native.kv_cache import KeyShape

if TYPE_CHECKING:
    from covey.accel.kernels.pooled import Stored

PROMPT_STEP = 128
"""Prompts have room for a multiple of so many tokens, so that memory and graphs serve longer."""
WIDTHS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of slots for which graphs are recorded; beyond, multiples of the last."""


def width_for(answers: int) -> int:
    """Return the next of these numbers of slots."""
    if answers > WIDTHS[-1]:
        return -(-answers // WIDTHS[-1]) * WIDTHS[-1]
    return next(width for width in WIDTHS if width >= answers)


class PooledCache:
    """Keys and values of prompts and answers, apart."""

    def __init__(
        self, *, slots: int, capacity: int, prompts: int, prompt_capacity: int, shape: KeyShape
    ) -> None:
        layers = range(shape.layers)
        self.prompt_keys = [shape.room(prompts, prompt_capacity) for _ in layers]
        self.prompt_values = [shape.room(prompts, prompt_capacity) for _ in layers]
        self.layer_keys = [shape.room(slots, capacity) for _ in layers]
        self.layer_values = [shape.room(slots, capacity) for _ in layers]

        def zeros() -> torch.Tensor:
            return torch.zeros(slots, dtype=torch.long, device=shape.device)

        self.place, self.prompt_row, self.prompt_length = zeros(), zeros(), zeros()
        """[S]: where a slot's next token is written, and which row its prompt is, how long."""
        self.active = zeros().bool()
        self.rows: dict[int, tuple[int, int]] = {}
        """By question: the row of its prompt, and its length."""
        self.free = list(range(prompts))

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self.place)

    @property
    def spare_prompts(self) -> int:
        """As many as there are free rows."""
        return len(self.free)

    def holds(self, *, slots: int, capacity: int, prompts: int, prompt_capacity: int) -> bool:
        """Tell whether there is room for so much."""
        rows, _, room, _ = self.prompt_keys[0].shape
        return (
            self.slots >= slots
            and self.layer_keys[0].shape[2] >= capacity
            and rows >= prompts
            and room >= prompt_capacity
        )

    def emptied(self) -> Self:
        """Free all slots and rows."""
        self.free = list(range(len(self.prompt_keys[0])))
        self.rows.clear()
        self.active.zero_()
        return self

    def remember(self, questions: Sequence[int], prompts: DynamicCache, lengths: list[int]) -> None:
        """Copy prompts to free rows."""
        index = torch.tensor(self._rows_for(questions, lengths), device=self.place.device)
        for number, layer in enumerate(prompts.layers):
            length = layer.keys.shape[2]
            self.prompt_keys[number][index, :, :length] = layer.keys
            self.prompt_values[number][index, :, :length] = layer.values

    def remember_packed(
        self,
        questions: Sequence[int],
        lengths: list[int],
        read: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy prompts to free rows; `read` has each layer's keys and values [tokens, K, D]."""
        counts = torch.tensor(lengths)
        which = row_of_each(counts)
        row = torch.tensor(self._rows_for(questions, lengths))[which]
        at = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        row, at = sent([row, at], self.place.device)
        for number, (keys, values) in enumerate(read):
            self.prompt_keys[number][row, :, at] = keys
            self.prompt_values[number][row, :, at] = values

    def stored(self, layer: int) -> Stored:
        """Return what a kernel has to know of a layer."""
        from covey.accel.kernels.pooled import Stored  # needs Triton

        return Stored(
            self.prompt_keys[layer],
            self.prompt_values[layer],
            self.prompt_row,
            self.prompt_length,
            self.layer_keys[layer],
            self.layer_values[layer],
            self.place,
            self.active,
        )

    def _rows_for(self, questions: Sequence[int], lengths: list[int]) -> list[int]:
        rows = [self.free.pop() for _ in questions]
        self.rows |= dict(zip(questions, zip(rows, lengths, strict=True), strict=True))
        return rows

    def enter(self, slots: torch.Tensor, questions: Sequence[int]) -> None:
        """Point each slot to its question's row."""
        mine = sent([torch.tensor([self.rows[q] for q in questions])], slots.device)[0]
        self.prompt_row[slots], self.prompt_length[slots] = mine.unbind(1)
        # Writing a token moves the place on by one, to where that token goes.
        self.place.index_fill_(0, slots, -1)

    def all_entered(self, question: int) -> None:
        """The slots still read it."""

    def all_ended(self, question: int) -> None:
        """Free the row."""
        self.free.append(self.rows.pop(question)[0])

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front."""
        moved = (self.place, self.prompt_row, self.prompt_length, self.active)
        for tensor in (*moved, *self.layer_keys, *self.layer_values):
            tensor[: len(slots)] = tensor[slots]
        self.active[len(slots) :] = False
