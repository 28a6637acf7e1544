"""transformers' from_pretrained with checks that it does not make."""

from __future__ import annotations

from typing import Any

import torch
import transformers

NO_CODE = {"trust_remote_code": False}
"""Model files may refer to Python code; without this transformers offers to run it."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_pretrained(kind: Any, source: str, dtype: torch.dtype) -> Any:
    """Load a model of a class; every weight must be in its files.

    transformers initializes missing weights at random and only warns. Here missing weights are a
    ValueError.
    """
    model, found = kind.from_pretrained(
        source,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, by name
        use_safetensors=True,  # all other formats are pickles, which can run code
        **NO_CODE,
    )
    missing = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if missing:
        what = f"{len(missing)} of its weights are missing or have another shape"
        raise ValueError(f"{what}, for example {missing[0]}")
    return model


def read_tokenizer(source: str, **more: str) -> Any:
    """Load a tokenizer without running code from its files."""
    return transformers.AutoTokenizer.from_pretrained(source, **more, **NO_CODE)


def make_savable(model: Any) -> None:
    """Replace generation settings that transformers refuses to save; keep the special tokens.

    An example is a temperature without do_sample. Covey samples with its own settings.
    """
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        kept = {name: getattr(settings, name) for name in IDS}
        model.generation_config = transformers.GenerationConfig(**kept)
