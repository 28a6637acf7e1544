"""The probe: compares the log-probs of server and trainer for one prompt after each sync.

vLLM may keep old weights without a warning, for example in a packed head, a cached prefix, or an
adapter of the same name. If a server had old weights, all log-probs would be slightly wrong, so a
difference between server and trainer ends the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from covey.engines.vllm.client import Client, Reply
from covey.models.language_model import LanguageModel

PROMPT_TOKENS = 160
"""Length of the probe prompt: more than a prefix-cache block, to detect a stale block."""
NEW_TOKENS = 8
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "max_tokens": NEW_TOKENS,
    "seed": 0,
    "logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}
EXACT, ROUNDED = 1e-4, 0.1
"""Tolerances: largest log-prob difference in float32, mean log-prob difference in 16 bits."""


def probe_prompt(model: LanguageModel) -> tuple[int, ...]:
    """Return a probe prompt with tokens from the whole vocabulary."""
    size = len(model.head.linear.weight)
    count = min(PROMPT_TOKENS, max(1, model.context // 2))
    return tuple((7919 * (place + 1)) % size for place in range(count))


def skeleton_of(module: nn.Module) -> nn.Module:
    """Return a copy of a model without weights, which can be called with any weights."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo | {id(buffer): buffer for buffer in module.buffers()}).eval()


@torch.no_grad()
def trainer_logp(
    skeleton: nn.Module,
    weights: Mapping[str, torch.Tensor],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
) -> torch.Tensor:
    """Return the log-probabilities of tokens after a prompt under the trainer's weights."""
    device = next(iter(weights.values())).device
    ids = torch.tensor([prompt + tokens], device=device)
    output = functional_call(skeleton, dict(weights), kwargs={"input_ids": ids, "use_cache": False})
    logp = torch.log_softmax(output.logits[0, len(prompt) - 1 : -1].float(), dim=-1)
    return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def check_probe(client: Client, reply: Reply, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how much the log-probs differ, or raise an error if they differ too much."""
    gaps = (torch.tensor(reply.logp[: len(wanted)]) - wanted).abs()
    exact = dtype == torch.float32
    gap, most = float(gaps.max() if exact else gaps.mean()), EXACT if exact else ROUNDED
    if not gap <= most:
        raise client.error(
            f"does not have the trainer's weights: the log-probs of a probe differ by {gap:.1g}, "
            f"more than {most:g}; check that it serves this model in this dtype"
        )
    return gap


def same_probe(client: Client, reply: Reply, before: Reply, dtype: torch.dtype) -> None:
    """Raise an error if a restarted server's log-probs differ from those of an earlier probe."""
    pairs = zip(reply.tokens, before.tokens, strict=True)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(before.tokens))
    # Rounding can change a sampled token. The tokens after it cannot be compared.
    check_probe(client, reply, torch.tensor(before.logp[: max(1, same)]), dtype)
