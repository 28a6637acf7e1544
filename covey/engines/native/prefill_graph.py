"""CUDA graphs for prefill: one launch for the forward pass over several prompts.

For a small model, Python takes longer to launch the kernels of a forward pass than the device takes
to run them, and no slot generates tokens meanwhile. Prompts are padded to the size of a bucket
(accel/static_buffers.py). The first pass of a bucket runs eagerly, the second pass is captured, and
later passes replay the graph. All passes of a bucket run the same kernels on tensors of the same
shapes, so their results do not depend on which passes came before.

In tensor shapes, N is the number of packed tokens of a bucket, and n is the number of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.accel.packing import PackedTables, prompt_tables, to_device
from covey.accel.static_buffers import Size, StaticBuffers
from covey.engines.native.sizes import PREFILL_FLOPS
from covey.models.logp import packed_hidden
from covey.notices import notice

if TYPE_CHECKING:
    from covey.engines.native.shared_prompt_cache import SharedPromptCache
    from covey.models.language_model import LanguageModel

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
