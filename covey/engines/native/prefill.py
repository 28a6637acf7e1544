"""Prefill of several prompts in one forward pass. A group's prompt is prefilled only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import torch
from transformers import DynamicCache

from covey.accel.packing import pack_prompts
from covey.engines.native.kv_cache import KVCache, SlotCache
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.engines.native.sizes import PREFILL_TOKENS
from covey.models.language_model import LanguageModel
from covey.models.logp import packed_hidden


def read_prompts(
    model: LanguageModel, cache: KVCache, prompts: dict[int, tuple[int, ...]]
) -> dict[int, torch.Tensor]:
    """Prefill prompts into a cache; return the next-token logits [V] of each prompt."""
    found: dict[int, torch.Tensor] = {}
    for together in _in_parts(prompts):
        tokens = [prompts[prompt] for prompt in together]
        lengths = [len(row) for row in tokens]
        if isinstance(cache, SharedPromptCache) and model.fused and model.flash:
            if cache.prefill.suits(model, cache, sum(lengths)):
                rows = cache.rows_for(together, lengths)
                logits = cache.prefill.read(model, cache, tokens, rows)
            else:
                layers, logits = _prefill_packed(model, tokens)
                cache.store_packed(together, lengths, layers)
        else:
            keeps_tokens = isinstance(cache, SlotCache) and not cache.layer_keys
            states, logits = _prefill(model, tokens, keeps_tokens=keeps_tokens)
            cache.store(together, states, lengths)
        found |= dict(zip(together, logits, strict=True))
    return found


def read_completions(
    model: LanguageModel,
    cache: KVCache,
    prompts: dict[int, tuple[int, ...]],
    completions: dict[int, list[int]],
) -> None:
    """Recompute the keys and values of paused completions, and store them in the slots.

    `prompts` and `completions` map each slot to the tokens of its prompt and completion. The cache
    must already contain the prompts, and must have reserved memory for the completions.
    """
    whole = {slot: (*prompts[slot], *new) for slot, new in completions.items() if new}
    for slots in _in_parts(whole):
        tokens = [whole[slot] for slot in slots]
        if model.fused and model.flash:
            packed, _ = _prefill_packed(model, tokens)
            layers = list(chain(*packed))
            begins = [0, *accumulate(len(row) for row in tokens)][: len(tokens)]
        else:
            states, _ = _prefill(model, tokens, keeps_tokens=False)
            layers = [state.transpose(1, 2).flatten(0, 1) for state in states]
            begins = [row * states[0].shape[2] for row in range(len(tokens))]
        rows = [
            torch.arange(begin + len(prompts[slot]), begin + len(whole[slot]))
            for slot, begin in zip(slots, begins, strict=True)
        ]
        cache.store_completions(slots, [len(row) for row in rows], torch.cat(rows), layers)


def _in_parts(prompts: dict[int, tuple[int, ...]]) -> Iterator[list[int]]:
    part: list[int] = []
    longest = 0
    for prompt, tokens in prompts.items():
        longest = max(longest, len(tokens))
        if part and longest * (len(part) + 1) > PREFILL_TOKENS:
            yield part
            part, longest = [], len(tokens)
        part.append(prompt)
    if part:
        yield part


def _prefill_packed(
    model: LanguageModel, prompts: list[tuple[int, ...]]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Run the trainer's fused forward pass; return packed keys and values, and logits."""
    packed = pack_prompts(prompts, model.device)
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden = packed_hidden(model, packed, layers.append)
    return layers, model.head.logits(hidden[packed.predictor])


def _prefill(
    model: LanguageModel, prompts: Sequence[tuple[int, ...]], *, keeps_tokens: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run the model's own forward pass; return keys and values for the cache, and logits."""
    rows = [torch.tensor(tokens) for tokens in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    last = torch.tensor([len(row) - 1 for row in rows], device=model.device)
    # Causal attention never reads the padding, which is on the right, so no mask is needed.
    cache = None if keeps_tokens else DynamicCache()
    kept = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    hidden = model.backbone(input_ids=ids, **kept).last_hidden_state
    logits = model.head.logits(hidden[torch.arange(len(rows), device=model.device), last])
    return [ids[:, None]] if cache is None else cache_states(cache), logits


def cache_states(cache: DynamicCache) -> list[torch.Tensor]:
    """Return the keys and values of a transformers cache, layer by layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
