"""Merge an adapter into its base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from covey.errors import ModelError
from covey.models.adapter import NAME, adapted_layers, load_adapter
from covey.models.chat_template import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.model_path import adapter_base

COPIED = f".modules_to_save.{NAME}."


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the merged weights W + (alpha / rank) B A under the base model's parameter names.

    The sum is computed in float32 or a more precise type. The model itself is not changed.
    """
    layers = dict(_adapted_weights(model))
    merged: dict[str, torch.Tensor] = {}
    for name, value in model.model.state_dict().items():
        # The trained copy takes the name of the original module.
        if ".lora_" in name or ".original_module." in name:
            continue
        exact = value.to(torch.promote_types(value.dtype, torch.float32))
        if name in layers:
            exact = exact + _delta(layers.pop(name), exact.dtype)
        merged[name.replace(".base_layer", "").replace(COPIED, ".")] = exact
    assert not layers, f"{next(iter(layers))} is not in the model"
    return merged


def _adapted_weights(model: LanguageModel) -> Iterator[tuple[str, Any]]:
    """Yield the name of every adapted weight, and the layer with its LoRA weights.

    Peft wraps a layer of experts once for each adapted tensor, so the wrappers are nested.
    """
    for name, layer in adapted_layers(model):
        inner, path = layer, name
        while hasattr(inner, "base_layer"):
            inner, path = inner.base_layer, f"{path}.base_layer"
        yield f"{path}.{getattr(layer, 'parameter_name', 'weight')}", layer


def _delta(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the LoRA update (alpha / rank) B A, for each expert if there are several experts."""
    down, up = (getattr(layer, part)[NAME].weight.to(dtype) for part in ("lora_A", "lora_B"))
    experts, turned = getattr(layer, "num_experts", 1), layer.fan_in_fan_out
    if experts > 1:
        # The rows of A are grouped by expert; the columns of B alternate between experts.
        down = down.unflatten(0, (experts, -1))
        up = up.unflatten(1, (-1, experts)).movedim(-1, 0)
        turned = not layer._did_swap_in_out_features
    delta: torch.Tensor = layer.scaling[NAME] * (up @ down)
    return delta.mT if turned else delta


def merge_adapter(folder: Path, out: Path) -> None:
    """Save base model and adapter of a checkpoint as one ordinary model in float32."""
    base = adapter_base(str(folder))
    if base is None:
        raise ModelError(f"model: {folder} contains no adapter")
    plain = Template(form="plain")  # no prompt is rendered, so the chat template does not matter
    bare = load_language_model(base, dtype="float32", device="cpu", template=plain)
    model = load_adapter(bare, folder)
    whole = model.model
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    if any(hasattr(end, "modules_to_save") for end in ends):
        # Input and output embeddings shared their weights, and one was trained separately.
        whole.config.tie_word_embeddings = False
    whole.save_pretrained(out, state_dict=merged_state_dict(model))
    model.tokenizer.save_pretrained(out)
