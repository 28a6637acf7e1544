"""Reading a model by transformers, which lets pass what shows only when it is too late."""

from __future__ import annotations

from typing import Any

import torch
import transformers

NO_CODE = {"trust_remote_code": False}
"""Files of a model may name Python code beside them; without this transformers asks to run it."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_pretrained(kind: Any, source: str, dtype: torch.dtype) -> Any:
    """Load a model of a class, with every one of its weights.

    What the files lack transformers draws at random, and only warns. Here it is a ValueError.
    """
    model, found = kind.from_pretrained(
        source,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are told below, by name
        use_safetensors=True,  # all else is pickle, which can run code as it is read
        **NO_CODE,
    )
    lacking = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if lacking:
        what = f"{len(lacking)} of its weights are missing or of another shape"
        raise ValueError(f"{what}, {lacking[0]} for one")
    return model


def read_tokenizer(source: str, **more: str) -> Any:
    """Load a tokenizer, without code of its own."""
    return transformers.AutoTokenizer.from_pretrained(source, **more, **NO_CODE)


def make_savable(model: Any) -> None:
    """Of settings for generation that transformers reads but refuses to save, keep the tokens.

    A temperature without do_sample is such a one. covey samples by its own settings.
    """
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        kept = {name: getattr(settings, name) for name in IDS}
        model.generation_config = transformers.GenerationConfig(**kept)
