"""Parity checks: compare a fast implementation with the model's own code, in float32.

In bfloat16, the hidden states of two correct implementations may have a relative difference of 1/3
after thirty layers, if the token sequences are unlike the training data. A parity check in bfloat16
would not find a mistake that is smaller than the rounding errors. A parity check runs the model's
first layers, with the model's own weights, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from covey.types import HostRows

LAYERS = 2
TOKENS = 32
"""Number of token ids in parity checks: every id is below `TOKENS`."""
NUMBERS = ("layer_idx", "layer_id", "layer_num", "layer_number")
"""Names of attributes that contain a layer's index, which is ignored when layer types are compared.
"""
FLOAT32_TOLERANCE = 1e-4
FAILURES: tuple[type[Exception], ...] = (
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
)
"""The errors that a fast implementation may raise for a model that it does not support."""
try:
    from triton.errors import TritonError
except ImportError:  # without Triton there are no kernels to compile
    pass
else:
    FAILURES = (*FAILURES, TritonError)


def is_silu(activation: Any) -> bool:
    """Return whether an activation is SiLU, the only activation with a fused kernel."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def first_layers(backbone: nn.Module) -> nn.Module:
    """Return a float32 copy of a backbone's first layers."""
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
    """Return a float32 copy of a module; truncate layer lists and token embeddings."""
    if isinstance(part, nn.ModuleList):
        named = getattr(config, "layer_types", None) or ()
        kinds = [(named[i : i + 1], _settings(layer)) for i, layer in enumerate(part)]
        # Include every layer type, even one that first appears late.
        enough = max([LAYERS, *(1 + kinds.index(kind) for kind in kinds)])
        return nn.ModuleList(copy.deepcopy(layer) for layer in part[:enough]).float()
    # An adapter keeps the original module next to the adapter's copy.
    embedding = getattr(part, "original_module", part)
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == config.vocab_size:
        part = nn.Embedding.from_pretrained(embedding.weight[:TOKENS].detach())
    return copy.deepcopy(part).float()


def _settings(layer: nn.Module) -> frozenset[tuple[str, type, str, float | str]]:
    """Return a key for a layer's type, made of its module types and scalar attributes."""
    return frozenset(
        (name, type(part), field, value)
        for name, part in layer.named_modules()
        for field, value in vars(part).items()
        if isinstance(value, int | float | str) and field not in NUMBERS
    )


def attempt(compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return `compute()` without gradients; None if the call raises one of FAILURES."""
    try:
        with torch.no_grad():
            return compute()
    except FAILURES:
        return None


def matches(
    one: torch.Tensor | None, other: torch.Tensor, tolerance: float = FLOAT32_TOLERANCE
) -> bool:
    """Return whether two results are equal up to a relative tolerance."""
    if one is None:
        return False
    return float((one - other).float().norm()) <= tolerance * float(other.float().norm())


def parity_rows(vocabulary: int) -> HostRows:
    """Return rows for a parity check: one prompt with three completions of different lengths."""
    prompt, lengths = torch.arange(2, 6) % vocabulary, torch.tensor([3, 1, 5])
    mask = torch.arange(5) < lengths[:, None]
    return HostRows(
        prompt_tokens=prompt.repeat(3, 1),
        prompt_lengths=torch.full_like(lengths, len(prompt)),
        tokens=prompt.repeat(2)[:5].where(mask, 0),
        lengths=lengths,
        mask=mask,
    )
