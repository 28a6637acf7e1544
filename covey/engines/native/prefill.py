"""Reading prompts: once for a whole group, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from covey.accel.packing import pack_prompts
from covey.engines.native.kv_cache import Memory, SlotCache
from covey.engines.native.shared_prompt_cache import PooledCache
from covey.engines.native.transformers_decoder import TokenMemory
from covey.models.language_model import LanguageModel
from covey.models.logp import device_hidden

PREFILL_TOKENS = 16_384
"""Prompt tokens, padded, that are read in one forward pass."""


def read_prompts(
    model: LanguageModel, memory: Memory, prompts: dict[int, tuple[int, ...]]
) -> dict[int, torch.Tensor]:
    """Read prompts, by number of question, into a memory; return the logits [V] of what follows."""
    found: dict[int, torch.Tensor] = {}
    for together in _in_parts(prompts):
        asked = [prompts[question] for question in together]
        lengths = [len(tokens) for tokens in asked]
        if isinstance(memory, PooledCache) and model.fused and model.flash:
            read, logits = _read_packed(model, asked)
            memory.remember_packed(together, lengths, read)
        elif isinstance(memory, TokenMemory):
            logits = _read(model, asked, None)
            memory.remember_tokens(together, asked)
        else:
            assert isinstance(memory, SlotCache | PooledCache)
            cache = DynamicCache()
            logits = _read(model, asked, cache)
            memory.remember(together, cache, lengths)
        found |= dict(zip(together, logits, strict=True))
    return found


def _in_parts(prompts: dict[int, tuple[int, ...]]) -> Iterator[list[int]]:
    part: list[int] = []
    longest = 0
    for question, tokens in prompts.items():
        longest = max(longest, len(tokens))
        if part and longest * (len(part) + 1) > PREFILL_TOKENS:
            yield part
            part, longest = [], len(tokens)
        part.append(question)
    if part:
        yield part


def _read_packed(
    model: LanguageModel, prompts: list[tuple[int, ...]]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Read prompts by the trainer's own forward pass; return keys and values, and logits."""
    packed = pack_prompts(prompts, model.device)
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden = device_hidden(model, packed, read)
    return read, model.head.logits(hidden[packed.predictor])


def _read(
    model: LanguageModel, prompts: Sequence[tuple[int, ...]], cache: DynamicCache | None
) -> torch.Tensor:
    """Read prompts by the model's own forward pass into a cache, if any; return logits."""
    rows = [torch.tensor(tokens) for tokens in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    last = torch.tensor([len(row) - 1 for row in rows], device=model.device)
    # Padding stands on the right, where causal attention never looks, so no mask is needed.
    kept = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    hidden = model.backbone(input_ids=ids, **kept).last_hidden_state
    return model.head.logits(hidden[torch.arange(len(rows), device=model.device), last])
