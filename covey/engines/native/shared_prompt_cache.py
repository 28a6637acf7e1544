"""KV cache for CUDA graphs: a prompt is stored once per group, and completions in pages.

The cache's tensors keep their addresses, so a captured graph stays valid. Storing a prompt once
saves memory, and lets attention read the prompt once for several slots. Because completions are
stored in pages, the pool of pages may be smaller than the memory that all completions would need at
full length.

In tensor shapes, P stands for prompts, S for slots, K for key-value heads, C for positions, B for
pages, T for pages per slot, and D for the head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from covey.accel.packing import (
    PackedTables,
    Size,
    StaticBuffers,
    prompt_tables,
    row_of_each,
    to_device,
)
from covey.engines.native.kv_cache import KVCache, KVShape
from covey.engines.native.sizes import PREFILL_FLOPS, page_for
from covey.models.logp import packed_hidden
from covey.notices import notice

if TYPE_CHECKING:
    from covey.accel.kernels.decode_attention import LayerCache
    from covey.models.language_model import LanguageModel


# CUDA graphs for prefill: one launch for the forward pass over several prompts.


MAX_BUCKETS = 16
"""Maximum number of buckets; if there are more, the least recently used bucket is dropped."""


class PrefillGraphs:
    """The captured prefill passes of one KV cache, whose addresses the graphs contain."""

    def __init__(self) -> None:
        self.passes: dict[Size, _Pass] = {}
        """Maps a bucket's size to its prefill pass, from least to most recently used."""
        self.failed = False
        """Whether a graph capture has failed; if so, no further pass is captured."""
        self._weights = 0
        """The number of parameters in the model's layers; 0 if not counted yet."""

    def suits(self, model: LanguageModel, cache: SharedPromptCache, tokens: int) -> bool:
        """Return whether to use a CUDA graph for a prefill pass over `tokens` tokens.

        A float8 cache does not use graphs, because its scales depend on the first prompts.
        """
        if not self._weights:
            layers: Any = model.backbone.layers
            self._weights = sum(parameter.numel() for parameter in layers.parameters())
        return not cache.float8 and 2 * self._weights * tokens <= PREFILL_FLOPS

    def read(
        self,
        model: LanguageModel,
        cache: SharedPromptCache,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[int],
    ) -> torch.Tensor:
        """Prefill prompts into rows of the cache; return the next-token logits [n, V]."""
        tables, longest = prompt_tables(prompts)
        size = Size.of(tables, longest)
        one = self.passes.pop(size, None) or _Pass(size, model.device)
        self.passes[size] = one
        if len(self.passes) > MAX_BUCKETS:
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # the dropped bucket's graph may be running
            del self.passes[next(iter(self.passes))]
        one.fill(tables, rows)
        if one.graph is None and one.last is not None and not self.failed:
            self._capture(one, model, cache)
        if one.graph is None:
            one.last = one.forward(model, cache)
        else:
            one.graph.replay()
        assert one.last is not None
        return model.head.logits(one.last[: len(prompts)])

    def _capture(self, one: _Pass, model: LanguageModel, cache: SharedPromptCache) -> None:
        """Capture a prefill pass as a CUDA graph; the pass must have run eagerly before."""
        if model.device.type != "cuda":
            return
        pool = next((p.graph.pool() for p in self.passes.values() if p.graph is not None), None)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                one.last = one.forward(model, cache)
        except RuntimeError as error:
            self.failed = True
            line = str(error).strip().splitlines()[0][:200]
            notice(f"prefill does not use CUDA graphs: {line}")
        else:
            one.graph = graph


class _Pass:
    """The prefill pass of one bucket: its input buffers, and its CUDA graph once captured."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.buffers = StaticBuffers(size, device, shared=False)
        self.stored = torch.zeros(3, size.tokens, dtype=torch.long, device=device)
        """[3, N]: each packed token's index, its cache row, and its position in this row."""
        self.last: torch.Tensor | None = None
        """The hidden state of each prompt's last token, from the newest pass."""
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, tables: PackedTables, rows: Sequence[int]) -> None:
        """Fill the input buffers with prompts and with the cache rows that store them."""
        self.buffers.fill(tables)
        stored = np.zeros(self.stored.shape, dtype=np.int64)
        count = len(tables.input_ids)
        stored[0, :count] = np.arange(count)
        stored[1, :count] = np.array(rows)[tables.begin.numpy()]
        stored[2, :count] = tables.position_ids.numpy()
        # Padding tokens have no place in the cache, so the first token is stored again instead.
        stored[1, count:] = rows[0]
        self.stored.copy_(to_device([torch.from_numpy(stored)], self.stored.device)[0])

    def forward(self, model: LanguageModel, cache: SharedPromptCache) -> torch.Tensor:
        """Write keys and values to the cache; return each prompt's last hidden state."""
        layers = iter(zip(cache.prompt_keys, cache.prompt_values, strict=True))
        tokens, rows, places = self.stored.unbind(0)

        def store(new: tuple[torch.Tensor, torch.Tensor]) -> None:
            for target, part in zip(next(layers), new, strict=True):
                target[rows, :, places] = part.index_select(0, tokens)

        packed = self.buffers.packed
        hidden = packed_hidden(model, packed, store)
        return hidden.index_select(0, packed.predictor)


UNIT_MARGIN = 4.0
"""Factor by which later float8 keys and values may exceed the largest keys and values of the first
prompts without being clipped.
"""
LEAST_UNIT = 1e-10
PRODUCT_ROWS = 16
"""Number of rows of a matrix product on tensor cores, which attention fills with the query heads of
several slots."""


def slots_together(query_heads: int) -> int:
    """Return how many slots share one read of their common prompt in attention.

    `query_heads` is the number of query heads that share a key head.
    """
    return 1 << (max(1, PRODUCT_ROWS // query_heads).bit_length() - 1)


def slots_by_prompt(prompt_rows: np.ndarray, together: int) -> np.ndarray:
    """Return slot indices [S, together]; all slots in a row have the same prompt.

    Rows with fewer than `together` slots are padded with -1. `prompt_rows` [S] contains the cache
    row of each slot's prompt, or -1 for a free slot.
    """
    order = np.argsort(prompt_rows, kind="stable")
    _, first, counts = np.unique(prompt_rows[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(first, counts)
    row = np.cumsum(rank % together == 0) - 1
    found = np.full((len(order), together), -1, dtype=np.int32)
    found[row, rank % together] = order
    return found


class SharedPromptCache(KVCache):
    """A KV cache with separate tensors for prompts and for completions."""

    def __init__(
        self,
        *,
        slots: int,
        capacity: int,
        prompts: int,
        prompt_capacity: int,
        shape: KVShape,
        pages: int | None = None,
        together: int = 2,
    ) -> None:
        """Allocate the cache; by default, it has enough pages for all slots at full length.

        Attention reads a prompt once for up to `together` slots with this prompt.
        """
        super().__init__(slots, shape.device)
        page = page_for(capacity)
        per_slot = -(-capacity // page)
        self.pages = Pages(slots * per_slot if pages is None else pages, slots, page)
        self.prompt_keys = shape.zeros(prompts, prompt_capacity)
        self.prompt_values = shape.zeros(prompts, prompt_capacity)
        self.layer_keys = shape.zeros(self.pages.count, page)
        self.layer_values = shape.zeros(self.pages.count, page)
        self.float8 = shape.float8
        self.units = torch.ones(shape.layers, 2, shape.heads, device=shape.device)
        """[layers, 2, K]: the scales of float8 keys and values."""
        self.has_units = not shape.float8
        self.prompt_row, self.prompt_length = (torch.zeros_like(self.place) for _ in range(2))
        """[S]: the cache row of each slot's prompt, and the prompt's length."""

        def counters(*sizes: int) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=torch.int32, device=shape.device)

        self.table = counters(slots, per_slot)
        """[S, T]: the pages of each slot's completion."""
        self.per_slot += [self.prompt_row, self.prompt_length, self.table]
        self.sharing = counters(slots, together)
        """[S, together]: slot indices; each row of the tensor lists slots with the same prompt."""
        self.arrived = counters(slots, shape.heads)
        """[S, K]: counters that tell a kernel when all partial attention outputs exist."""
        self.slot_rows = np.full(slots, -1)
        """[S]: a copy of `prompt_row` on the CPU, with -1 for free slots."""
        self.rows: dict[int, tuple[int, int]] = {}
        """Maps a prompt id to the prompt's cache row and length."""
        self.free = list(range(prompts))
        self.prefill = PrefillGraphs()
        self._share()

    @property
    def spare_prompts(self) -> int:
        return len(self.free)

    def emptied(self) -> Self:
        self.free = list(range(len(self.prompt_keys[0])))
        self.rows.clear()
        self.active.zero_()
        self.arrived.zero_()
        self.has_units = not self.float8
        self.leave(range(self.slots))
        self._share()
        return self

    def store(self, prompts: Sequence[int], states: list[torch.Tensor], lengths: list[int]) -> None:
        index = torch.tensor(self.rows_for(prompts, lengths), device=self.place.device)
        by_layer = _by_layer(self.prompt_keys, self.prompt_values)
        self._set_units(source.abs().amax(dim=(0, 2, 3)) for source in states)
        units = self.units.flatten(0, 1)
        for target, source, unit in zip(by_layer, states, units, strict=True):
            _raw(target)[index, :, : source.shape[2]] = self._stored(source, unit[:, None, None])

    def store_packed(
        self,
        prompts: Sequence[int],
        lengths: list[int],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy prompts to free rows; `layers` are packed keys and values [tokens, K, D]."""
        counts = torch.tensor(lengths)
        which = row_of_each(counts)
        row = torch.tensor(self.rows_for(prompts, lengths))[which]
        at = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        row, at = to_device([row, at], self.place.device)
        by_layer = _by_layer(self.prompt_keys, self.prompt_values)
        self._set_units(source.abs().amax(dim=(0, 2)) for source in chain(*layers))
        units = self.units.flatten(0, 1)
        for target, source, unit in zip(by_layer, chain(*layers), units, strict=True):
            _raw(target)[row, :, at] = self._stored(source, unit[:, None])

    def _set_units(self, largest: Iterable[torch.Tensor]) -> None:
        """Set the float8 scales from the largest absolute keys and values [K] of prompts.

        The scales stay the same until the cache is emptied, because stored numbers depend on the
        scales. The scales therefore leave room for later keys and values that are larger than the
        keys and values of the prompts. A larger scale does not increase the relative error of a
        float8 number.
        """
        if not self.has_units:
            top = torch.finfo(torch.float8_e4m3fn).max
            found = torch.stack(list(largest)).view_as(self.units)
            self.units.copy_((found * (UNIT_MARGIN / top)).clamp(min=LEAST_UNIT))
            self.has_units = True

    def _stored(self, numbers: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Convert keys or values to the cache's dtype; return float8 numbers as bytes."""
        if not self.float8:
            return numbers
        top = torch.finfo(torch.float8_e4m3fn).max
        return _raw((numbers.float() / unit).clamp(-top, top).to(torch.float8_e4m3fn))

    def store_completions(
        self, slots: list[int], counts: list[int], rows: torch.Tensor, layers: list[torch.Tensor]
    ) -> None:
        at = [np.arange(count) for count in counts]
        page = self.pages.page
        owned = [
            np.array(self.pages.of_slot[slot])[mine // page]
            for slot, mine in zip(slots, at, strict=True)
        ]
        pages, inside = np.concatenate(owned), np.concatenate(at) % page
        parts = [rows, torch.from_numpy(pages), torch.from_numpy(inside)]
        source, target, cell = to_device(parts, self.place.device)
        by_layer = _by_layer(self.layer_keys, self.layer_values)
        for tensor, new, unit in zip(by_layer, layers, self.units.flatten(0, 1), strict=True):
            _raw(tensor)[target, :, cell] = self._stored(new[source], unit[:, None])

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
            self.table,
            self.place,
            self.active,
            self.sharing,
            self.arrived,
            self.units[number],
        )

    def rows_for(self, prompts: Sequence[int], lengths: list[int]) -> list[int]:
        """Assign a free cache row to each prompt, and return the row indices."""
        rows = [self.free.pop() for _ in prompts]
        self.rows |= dict(zip(prompts, zip(rows, lengths, strict=True), strict=True))
        return rows

    def enter(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        mine = [self.rows[prompt] for prompt in prompts]
        index, ours = to_device([torch.tensor(slots), torch.tensor(mine)], self.place.device)
        self.prompt_row[index], self.prompt_length[index] = ours.unbind(1)
        # Writing a token first increments `place`, and then writes at the new `place`.
        self.place.index_fill_(0, index, -1)
        self.slot_rows[slots] = [row for row, _ in mine]
        self._share()

    def _share(self) -> None:
        """Update the table that tells kernels which slots have the same prompt."""
        rows = torch.from_numpy(slots_by_prompt(self.slot_rows, self.sharing.shape[1]))
        self.sharing.copy_(to_device([rows], self.place.device)[0])

    def reserve(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        changes = self.pages.reserve(slots, positions)
        if changes is None:
            return False
        if len(changes):
            (new,) = to_device([torch.from_numpy(changes)], self.place.device)
            self.table[new[:, 0], new[:, 1]] = new[:, 2].int()
        return True

    def admits(self, positions: np.ndarray) -> int:
        return self.pages.admits(positions)

    def leave(self, slots: Sequence[int]) -> None:
        self.pages.release(slots)
        self.slot_rows[list(slots)] = -1

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, without moving their keys and values in memory."""
        super().keep(slots)
        self.pages.keep(slots)
        kept = self.slot_rows[list(slots)]
        self.slot_rows[:] = -1
        self.slot_rows[: len(slots)] = kept
        self._share()

    def all_ended(self, prompt: int) -> None:
        self.free.append(self.rows.pop(prompt)[0])


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float8 tensor as bytes, which torch can index; return other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _by_layer(keys: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for layer in zip(keys, values, strict=True) for tensor in layer]


# Page tables of the KV cache: assign pages of a pool to the completions in slots.
#
# Keys and values of a completion are stored in pages of a fixed number of positions, so the used
# memory depends on the actual lengths of completions. The CPU assigns pages before the device needs
# them, and a slot keeps its pages until its completion has ended or is paused.


class Pages:
    """Records which KV cache pages each slot owns and which pages are free."""

    def __init__(self, pages: int, slots: int, page: int) -> None:
        self.page, self.count = page, pages
        self.of_slot: list[list[int]] = [[] for _ in range(slots)]
        self.owned = np.zeros(slots, dtype=np.int64)
        """[S]: the number of pages of each slot."""
        self.free = list(range(pages))

    def needed(self, positions: np.ndarray) -> np.ndarray:
        """Return how many pages each slot needs to store its `positions` tokens."""
        return -(-positions // self.page)

    def reserve(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Assign enough pages to `slots[i]` to store `positions[i]` tokens, for every i.

        Return the slot, the index within the slot and the page number of each new page, as [n, 3].
        If there are too few free pages, return None and change nothing.
        """
        more = np.maximum(self.needed(positions) - self.owned[slots], 0)
        if more.sum() > len(self.free):
            return None
        changes = []
        for slot, count in zip(slots[more > 0].tolist(), more[more > 0].tolist(), strict=True):
            own = self.of_slot[slot]
            for _ in range(count):
                changes.append((slot, len(own), self.free[-1]))
                own.append(self.free.pop())
        self.owned[slots] += more
        return np.array(changes, dtype=np.int64).reshape(-1, 3)

    def admits(self, positions: np.ndarray) -> int:
        """Return how many more completions fit into free pages.

        Completion i needs space for `positions[i]` tokens. One free page is reserved for each
        running completion, because completions grow.
        """
        spare = len(self.free) - np.count_nonzero(self.owned)
        return int(np.searchsorted(np.cumsum(self.needed(positions) + 1), spare, side="right"))

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.free += self.of_slot[slot]
            self.of_slot[slot], self.owned[slot] = [], 0

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and free the pages of the other slots."""
        self.release(set(range(len(self.of_slot))) - set(slots))
        kept = [self.of_slot[slot] for slot in slots]
        self.of_slot = kept + [[] for _ in range(len(self.of_slot) - len(kept))]
        self.owned[:] = [len(own) for own in self.of_slot]
