"""From a model with an adapter to an ordinary one that says the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from covey.errors import ModelError
from covey.models.adapter import NAME, adapted_layers, adapter_base, load_adapter
from covey.models.chat_template import Template
from covey.models.language_model import LanguageModel, load_language_model

COPIED = f".modules_to_save.{NAME}."


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the weights W + (alpha / rank) B A under the names of the model without adapter.

    The sum is taken in float32 or better, and the model stays as it is.
    """
    layers = dict(_adapted_weights(model))
    merged: dict[str, torch.Tensor] = {}
    for name, value in model.model.state_dict().items():
        # Beside an original module stands the copy that was trained, and takes its name.
        if ".lora_" in name or ".original_module." in name:
            continue
        exact = value.to(torch.promote_types(value.dtype, torch.float32))
        if name in layers:
            exact = exact + _delta(layers.pop(name), exact.dtype)
        merged[name.replace(".base_layer", "").replace(COPIED, ".")] = exact
    assert not layers, f"{next(iter(layers))} is not in the model"
    return merged


def _adapted_weights(model: LanguageModel) -> Iterator[tuple[str, Any]]:
    """Give the name of every weight that has low-rank neighbours, and the layer that holds these.

    Of a layer of experts peft adapts one tensor after the other, each wrapped around the last.
    """
    for name, layer in adapted_layers(model):
        inner, path = layer, name
        while hasattr(inner, "base_layer"):
            inner, path = inner.base_layer, f"{path}.base_layer"
        yield f"{path}.{getattr(layer, 'parameter_name', 'weight')}", layer


def _delta(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return (alpha / rank) B A, of each expert where there are several."""
    down, up = (getattr(layer, part)[NAME].weight.to(dtype) for part in ("lora_A", "lora_B"))
    experts, turned = getattr(layer, "num_experts", 1), layer.fan_in_fan_out
    if experts > 1:
        # The rows of A are those of one expert after the other; the columns of B take turns.
        down = down.unflatten(0, (experts, -1))
        up = up.unflatten(1, (-1, experts)).movedim(-1, 0)
        turned = not layer._did_swap_in_out_features
    delta: torch.Tensor = layer.scaling[NAME] * (up @ down)
    return delta.mT if turned else delta


def merge_adapter(folder: Path, out: Path) -> None:
    """Write base and adapter of a checkpoint as one ordinary model, in float32, into a folder."""
    base = adapter_base(str(folder))
    if base is None:
        raise ModelError(f"model: {folder} holds no adapter that could be merged")
    plain = Template(form="plain")  # nothing is asked, whatever its chat template is like
    bare = load_language_model(base, dtype="float32", device="cpu", template=plain)
    model = load_adapter(bare, folder)
    whole = model.model
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    if any(hasattr(end, "modules_to_save") for end in ends):
        # One of two that shared their weights was trained on its own.
        whole.config.tie_word_embeddings = False
    whole.save_pretrained(out, state_dict=merged_state_dict(model))
    model.tokenizer.save_pretrained(out)
