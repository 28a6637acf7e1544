"""Digests of a model, which client and reference server compare before they exchange data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from covey.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Three digests of a model, as SHA-256 in hexadecimal."""

    tokenizer: str
    """The digest of the vocabulary (the text of every token id) and of the special token ids. The
    tokenizer's digest must be the same on client and server."""
    model: str
    """The digest of architecture, vocabulary size, number of layers and hidden size. Client and
    server may have different architectures, because the reference model may be larger than the
    policy."""
    weights: str
    """The digest of all weights, in the dtype that the model computes with."""


def fingerprint(model: LanguageModel) -> Fingerprint:
    """Compute the digests of a model.

    Computing the digests takes about a second for each gigabyte of weights.
    """
    config = model.model.config
    shape = {
        "architecture": type(model.model).__name__,
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
    }
    return Fingerprint(
        tokenizer=tokenizer_digest(model), model=_digest(shape), weights=_weights_digest(model)
    )


def tokenizer_digest(model: LanguageModel) -> str:
    """Return the digest of a tokenizer's vocabulary and special token ids."""
    tokenizer = model.tokenizer
    return _digest(
        {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "special": sorted(tokenizer.all_special_ids),
            "end": tokenizer.eos_token_id,
            "padding": tokenizer.pad_token_id,
        }
    )


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _weights_digest(model: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        flat = weight.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
