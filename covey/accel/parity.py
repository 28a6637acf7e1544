"""Trying a way to compute what a model computes, where rounding cannot hide a mistake.

In bfloat16 two right ways may differ by a third after thirty layers, on tokens that a model was
never trained on. So what is tried is the first layers of it, with its own weights, in float32.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from covey.types import Batch

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone."""
LAYERS = 2
TOKENS = 32
"""Trials use token ids below this."""
NUMBERS = ("layer_idx", "layer_id", "layer_num", "layer_number")
"""What layers call their own number, which makes none a kind of its own."""


def plain_positions(config: Any) -> bool:
    """Tell whether every layer attends to all that came before, at angles of the position alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    window = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    plain = rope.get("rope_type", "default") in PLAIN_ROPE
    turned = all(getattr(config, "no_rope_layers", None) or ())  # 0: a layer without angles
    scaled = rope.get("llama_4_scaling_beta")  # queries that grow with the position
    return plain and turned and not scaled and kinds == {"full_attention"} and not window


def is_silu(activation: Any) -> bool:
    """Tell whether an activation is the one that there are kernels for."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def first_layers(backbone: nn.Module) -> nn.Module:
    """Return a backbone of the first layers alone, in float32 and apart from the model's own."""
    model: Any = backbone
    small = copy.copy(model)
    small._modules = {
        name: None if part is None else _first(part, model.config)
        for name, part in model._modules.items()
    }
    small.eval()
    assert isinstance(small, nn.Module)
    return small


def _first(part: nn.Module, config: Any) -> nn.Module:
    """Return the first layers of layers, the first tokens of an embedding, and others whole."""
    if isinstance(part, nn.ModuleList):
        named = getattr(config, "layer_types", None) or ()
        kinds = [(named[i : i + 1], _settings(layer)) for i, layer in enumerate(part)]
        # A kind of layer that comes late has to be seen, too.
        enough = max([LAYERS, *(1 + kinds.index(kind) for kind in kinds)])
        return nn.ModuleList(copy.deepcopy(layer) for layer in part[:enough]).float()
    embedding = getattr(part, "original_module", part)  # the one beside which an adapter has a copy
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == config.vocab_size:
        part = nn.Embedding.from_pretrained(embedding.weight[:TOKENS].detach())
    return copy.deepcopy(part).float()


def _settings(layer: nn.Module) -> frozenset[tuple[str, type, str, float | str]]:
    """Return what tells kinds of layers apart: their parts, and the plain attributes of these."""
    return frozenset(
        (name, type(part), field, value)
        for name, part in layer.named_modules()
        for field, value in vars(part).items()
        if isinstance(value, int | float | str) and field not in NUMBERS
    )


def matches(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two results of the same arithmetic in float32 are the same but for rounding."""
    apart = (one - other).float().norm()
    return float(apart) <= 1e-4 * float(other.float().norm())


def parity_batch(prompt: torch.Tensor, lengths: torch.Tensor) -> Batch:
    """Return a batch that repeats a prompt's tokens as completions of the given lengths."""
    rows, longest = len(lengths), int(lengths.max())
    mask = torch.arange(longest, device=prompt.device) < lengths[:, None]
    zeros = torch.zeros(rows, device=prompt.device)
    return Batch(
        prompt_tokens=prompt.expand(rows, -1),
        prompt_lengths=torch.full_like(lengths, len(prompt)),
        tokens=prompt[torch.arange(longest, device=prompt.device) % len(prompt)].where(mask, 0),
        lengths=lengths,
        mask=mask,
        sampler_logp=zeros[:, None].expand(-1, longest),
        rewards=zeros.double(),
        success=zeros.bool(),
        group=torch.zeros_like(lengths),
        truncated=zeros.bool(),
    )
