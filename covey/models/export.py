"""Export a model's weights, tokenizer and stop tokens, without training state."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from covey.errors import ModelError
from covey.models.adapter import NAME, adapted_layers, load_adapter
from covey.models.chat import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.model_path import adapter_base
from covey.records.files import check_free, whole_folder

MakeCard = Callable[[Sequence[int], bool], str]
"""Function that returns the text of README.md, given the stop tokens and whether an adapter was
merged."""


def export_model(
    source: str, folder: Path, *, dtype: str, template: Template, card: MakeCard
) -> None:
    """Atomically write a model folder that transformers and inference engines can load."""
    check_free(folder)
    with whole_folder(folder) as partial:
        adapted = adapter_base(source) is not None
        merged = partial / "merged"
        if adapted:
            merge_adapter(Path(source), merged)
        model = load_language_model(
            str(merged) if adapted else source, dtype=dtype, device="cpu", template=template
        )
        tokenizer, inner = model.tokenizer, model.model
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        first = [i for i in model.stop_ids if i == tokenizer.eos_token_id]
        stops = first + [i for i in model.stop_ids if i not in first]
        for config in (inner.config, inner.generation_config):
            # List all stop tokens, because inference engines stop only at eos_token_id.
            config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
            config.pad_token_id = tokenizer.pad_token_id
        try:
            inner.save_pretrained(partial)
        except SafetensorError as error:
            raise OSError(str(error)) from None  # from safetensors, for example on a full disk
        tokenizer.save_pretrained(partial)
        readable = (partial / "config.json").stat().st_mode
        for weights in partial.glob("*.safetensors"):
            weights.chmod(readable)  # safetensors makes its files readable only by their owner
        shutil.rmtree(merged, ignore_errors=True)
        (partial / "README.md").write_text(card(model.stop_ids, adapted), encoding="utf-8")


# Merge an adapter into its base model.

COPIED = f".modules_to_save.{NAME}."


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the merged weights W + (alpha / rank) B A under the base model's parameter names.

    The merged weights are computed in float32 or a more precise type. The model itself is not
    changed.
    """
    layers: dict[str, Any] = {}
    for name, layer in adapted_layers(model):
        # peft wraps a mixture-of-experts layer once for each adapted tensor: wrappers are nested.
        inner, path = layer, name
        while hasattr(inner, "base_layer"):
            inner, path = inner.base_layer, f"{path}.base_layer"
        layers[f"{path}.{getattr(layer, 'parameter_name', 'weight')}"] = layer
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


def _delta(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the LoRA update (alpha / rank) B A; a layer of experts has one update per expert."""
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
    """Merge a checkpoint's adapter into its base model, and save the result in float32."""
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
