"""From a model with an adapter to an ordinary one that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from covey.errors import ModelError
from covey.policy.adapter import NAME, adapter_base, load_adapter
from covey.policy.model import LanguageModel, load_language_model

BASE_WEIGHT = ".base_layer.weight"
COPIED = f".modules_to_save.{NAME}."


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the weights W + (alpha / rank) B A under the names of the model without adapter.

    The sum is taken in float32 or better, and the model stays as it is.
    """
    layers = dict(model.model.named_modules())
    merged: dict[str, torch.Tensor] = {}
    for name, value in model.model.state_dict().items():
        # Beside an original module stands the copy that was trained, and takes its name.
        if ".lora_" in name or ".original_module." in name:
            continue
        exact = value.to(torch.promote_types(value.dtype, torch.float32))
        if name.endswith(BASE_WEIGHT):
            exact = exact + _delta(layers[name.removesuffix(BASE_WEIGHT)], exact.dtype)
        merged[name.replace(".base_layer.", ".").replace(COPIED, ".")] = exact
    return merged


def _delta(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    down, up = (getattr(layer, part)[NAME].weight.to(dtype) for part in ("lora_A", "lora_B"))
    delta: torch.Tensor = layer.scaling[NAME] * (up @ down)
    return delta.t() if layer.fan_in_fan_out else delta


def merge_adapter(folder: Path, out: Path) -> None:
    """Write base and adapter of a checkpoint as one ordinary model, in float32, into a folder."""
    base = adapter_base(str(folder))
    if base is None:
        raise ModelError(f"model: {folder} holds no adapter that could be merged")
    model = load_adapter(load_language_model(base, dtype="float32", device="cpu"), folder)
    whole = model.model
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    if any(hasattr(end, "modules_to_save") for end in ends):
        # One of two that shared their weights was trained on its own.
        whole.config.tie_word_embeddings = False
    whole.save_pretrained(out, state_dict=merged_state_dict(model))
    model.tokenizer.save_pretrained(out)
