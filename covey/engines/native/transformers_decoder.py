"""Decoding by a model's own forward pass in transformers, for models that are not written out.

Three ways, each for fewer assumptions and each slower than the one before: over prompts that slots
share, as a step that can be recorded; over slots that hold prompt and answer; and, for models that
keep more of the past than keys and values, by reading all of it again for every token.

Shapes: W slots in use, S slots, L positions, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from covey.accel.attention import NAME
from covey.engines.native.kv_cache import SlotCache, attention_mask
from covey.engines.native.llama_decoder import NotUnderstood
from covey.engines.native.shared_prompt_cache import PooledCache
from covey.models.language_model import LanguageModel

KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that see all positions, or a window of them."""


@dataclass(frozen=True, slots=True)
class TransformersDecoder:
    """The model's own forward pass over slots."""

    model: LanguageModel

    def __post_init__(self) -> None:
        # GPT-Neo's windows end where the keys do, which is where the longest slot ends.
        if "local" in (getattr(self.model.model.config, "attention_layers", None) or ()):
            raise NotUnderstood("its local layers take all slots to be of the same length")

    def begin(self, positions: int) -> None:
        """There is nothing to prepare."""

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Run the model on one token a slot."""
        place = cache.place[: cache.width]
        dtype = self.model.head.linear.weight.dtype
        hidden: torch.Tensor = self.model.backbone(
            input_ids=tokens[:, None],
            attention_mask=attention_mask(self.model.model.config, place, cache.reach, dtype),
            position_ids=place[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden[:, 0]


class PooledDecoder:
    """The model's own forward pass over prompts that slots share; it can be recorded.

    Nothing in it waits for the host, unless the model's own code does.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        config: Any = model.backbone.config
        if model.model.config._attn_implementation != NAME:
            raise NotUnderstood("its attention is not transformers' standard one")
        self.windows = _windows(config)

    def begin(self, positions: int) -> None:
        """There is nothing to prepare."""

    def step(self, tokens: torch.Tensor, cache: PooledCache) -> torch.Tensor:
        """Run the model on one token a slot."""
        width = len(tokens)
        view = _PooledView(cache, self.windows)
        position = cache.prompt_length[:width] + cache.place[:width]
        hidden: torch.Tensor = self.model.backbone(
            input_ids=tokens[:, None],
            # A mask of four dimensions is handed on as it is, and no other is made.
            attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
            position_ids=position[:, None],
            past_key_values=view,
            packing=view,
            use_cache=True,
        ).last_hidden_state
        if view.attended != len(cache.layer_keys):
            raise NotUnderstood("not all of its layers attend by the function that is registered")
        return hidden[:, 0]


class _PooledView(Cache):  # type: ignore[misc] # transformers is untyped
    """What one step of a model sees of a pooled cache: as its cache, and as its attention."""

    def __init__(self, pool: PooledCache, windows: Sequence[int | None] | int | None) -> None:
        super().__init__(layers=[])
        self.pool, self.windows = pool, windows
        self.attended = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values on to attention, which keeps them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models that are told positions do not ask."""
        return 0

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend from query [W, H, 1, D], with the new key and value [W, K, 1, D]."""
        from covey.accel.kernels.pooled import pooled_attention  # needs Triton

        layer, window = module.layer_idx, options.get("sliding_window")
        # A trial of a few tokens would not show a window that is wrong, so it is checked here.
        expected = self.windows[layer] if isinstance(self.windows, list) else self.windows
        if window != expected:
            raise NotUnderstood(f"layer {layer} has a window of {window} and not of {expected}")
        scaling = options.get("scaling")
        self.attended += 1
        return pooled_attention(
            query[:, :, 0],
            key[:, :, 0],
            value[:, :, 0],
            self.pool.stored(layer),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=options.get("softcap"),
        )[:, None]


def _windows(config: Any) -> list[int | None] | int | None:
    """Return the window of each layer by what the configuration says, or the same one for all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        return window
    if others := sorted(set(kinds) - set(KINDS)):
        raise NotUnderstood(f"it has layers of kind {others[0]}")
    return [window if kind == KINDS[1] else None for kind in kinds]


class TokenMemory:
    """Slots that hold the tokens of prompt and answer, and no keys."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.tokens = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        self.place = torch.zeros(slots, dtype=torch.long, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.width, self.reach = slots, 0

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self.place)

    @property
    def capacity(self) -> int:
        """The most positions a slot can hold."""
        return self.tokens.shape[1]

    @property
    def bytes(self) -> int:
        """Memory of all tokens."""
        return self.tokens.nbytes

    @property
    def spare_prompts(self) -> int:
        """None: there would be nothing to gain."""
        return 0

    def emptied(self) -> TokenMemory:
        """Free all slots."""
        self.prompts.clear()
        self.active.zero_()
        return self

    def remember_tokens(self, questions: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> None:
        """Keep prompts under the numbers of questions."""
        self.prompts |= dict(zip(questions, prompts, strict=True))

    def enter(self, slots: torch.Tensor, questions: Sequence[int]) -> None:
        """Copy each question's prompt into its slot."""
        rows = [torch.tensor(self.prompts[question]) for question in questions]
        lengths = torch.tensor([len(row) for row in rows], device=slots.device)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(slots.device)
        self.tokens[slots, : padded.shape[1]] = padded
        # Writing a token moves the place on by one, to where that token goes.
        self.place[slots] = lengths - 1

    def all_entered(self, question: int) -> None:
        """Forget the prompt: every slot has a copy."""
        del self.prompts[question]

    def all_ended(self, question: int) -> None:
        """There is nothing left to forget."""

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front and shrink to them."""
        for tensor in (self.tokens, self.place, self.active):
            tensor[: len(slots)] = tensor[slots]
        self.active[len(slots) :] = False
        self.width = len(slots)


@dataclass(frozen=True, slots=True)
class RereadingDecoder:
    """The model's own forward pass over all tokens so far."""

    model: LanguageModel

    def begin(self, positions: int) -> None:
        """There is nothing to prepare."""

    def step(self, tokens: torch.Tensor, cache: TokenMemory) -> torch.Tensor:
        """Put the new tokens at their place and read everything up to there."""
        slots = torch.arange(cache.width, device=tokens.device)
        place = cache.place[: cache.width]
        cache.tokens[slots, place] = tokens
        # Padding stands on the right, where causal models never look, so no mask is needed.
        ids = cache.tokens[: cache.width, : cache.reach]
        hidden: torch.Tensor = self.model.backbone(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[slots, place]
