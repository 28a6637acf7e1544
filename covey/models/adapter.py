"""LoRA adapters: low-rank weights that are trained on top of a frozen model.

An adapted linear layer computes `W x + (alpha / rank) B A x`, where W is frozen and A and B are
trained. The matrix B starts at zero, so a new adapter does not change the model's outputs. Peft
replaces the linear layers of the model in place, so attention and packing need no changes.

LoRA dropout is applied to the input of an adapter, and only in forward passes with a gradient.
Covey generates, evaluates and computes old_logp without dropout. With dropout, the trained policy
differs from the policy that sampled the completions.
"""

from __future__ import annotations

import hashlib
import json
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from covey.accel.fused_parameters import fuse_adapters
from covey.embedded import CHECKPOINT
from covey.errors import ConfigError, CoveyError, ModelError, nearest
from covey.escape import printable_line
from covey.models.model_path import ADAPTER_CONFIG, check_peft

if TYPE_CHECKING:
    from covey.models.language_model import LanguageModel

NAME = "default"
"""The default name of an adapter in peft."""
WEIGHTS_FILE = "adapter_model.safetensors"
CONV = "Conv1D"
"""Class name of GPT-2's linear layer, which stores its weight transposed."""


def add_adapter(
    model: LanguageModel,
    *,
    rank: int,
    alpha: int = 32,
    targets: Sequence[str] = ("all-linear",),
    also_train: Sequence[str] = (),
    seed: int = 0,
    base: str = "",
) -> LanguageModel:
    """Freeze a model and add a LoRA adapter, whose initial weights depend only on the seed.

    The adapter also trains a full copy of each module that `also_train` names. `base` is the path
    of the frozen base model. If `base` is empty, the adapter records the model's own
    `name_or_path`.
    """
    peft, all_linear = _peft(), list(targets) == ["all-linear"]
    base = base or model.model.name_or_path
    # The base may not depend on the working folder or on where covey is installed. The packaged
    # model is meant even if a folder has its name.
    if base in ("embedded", str(CHECKPOINT)):
        base = "embedded"
    elif base and Path(base).exists():
        base = str(Path(base).resolve())
    if not all_linear:
        _check_targets(model, targets)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear" if all_linear else sorted(targets),
        modules_to_save=_modules_to_copy(model, also_train) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    model = _inject(model, config)
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            weight = layer.lora_A[NAME].weight
            key = hashlib.blake2b(f"adapter {seed} {name}".encode(), digest_size=16).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            uniform = torch.from_numpy(generator.random(tuple(weight.shape), dtype=np.float32))
            weight.copy_((2 * uniform - 1) * weight.shape[1] ** -0.5)
            layer.lora_B[NAME].weight.zero_()
    return model


def load_adapter(model: LanguageModel, folder: Path) -> LanguageModel:
    """Freeze a model and load an adapter in peft's format; set the adapter's dropout to 0."""
    try:
        saved = load_file(folder / WEIGHTS_FILE)
        config = _read_config(folder)
        ranks = {len(w) for n, w in saved.items() if "lora_A" in n or "lora_embedding_A" in n}
        for rank in (config.r, *(config.rank_pattern or {}).values()):
            # peft would allocate matrices of a wrong rank, however large, before they are compared.
            if type(rank) is not int or not 0 < rank <= max(ranks, default=0):
                raise ValueError(
                    f"{ADAPTER_CONFIG} names the rank {printable_line(repr(rank), 40)}, but the "
                    f"largest rank in {WEIGHTS_FILE} is {max(ranks, default=0)}"
                )
        model = _inject(model, config)
    except CoveyError:
        raise
    except Exception as error:  # a wrong value in the adapter's files may raise anything
        problem = ModelError(f"model: the adapter {folder} cannot be read: {error}")
        problem.details = "".join(traceback.format_exception(error))
        raise problem from None
    is_plain_lora = (  # and not one of peft's variants
        model.adapter.bias == "none"
        and not model.adapter.lora_bias
        and not hasattr(model.model.get_output_embeddings(), "lora_A")
        and all(NAME in m.lora_A and not m.lora_variant for _, m in adapted_layers(model))
    )
    if not is_plain_lora:
        raise ModelError(
            f"model: {folder} is not a plain LoRA adapter on linear layers of the backbone; Covey "
            "supports no other adapters"
        )
    weights = named_weights(model, saved)
    if unknown := saved.keys() - {_file_name(name) for name in weights}:
        name = min(unknown)
        raise ModelError(
            f"model: the adapter {folder} does not fit the model, which has no tensor {name}"
        )
    with torch.no_grad():
        for name, parameter in _trained(model.model):
            if name not in weights or weights[name].shape != parameter.shape:
                raise ModelError(
                    f"model: the adapter {folder} does not fit the model: the tensor {name} is "
                    "missing or has another shape"
                )
            parameter.copy_(weights[name])
    return model


KEYS = frozenset(
    ("alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules", "init_lora_weights",
     "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save", "r",
     "rank_pattern", "target_modules", "target_parameters", "task_type", "use_rslora")
)  # fmt: skip
"""The settings of an adapter_config.json that reach peft. Versions of peft import the module that
other settings name."""
UNUSED = frozenset(
    ("auto_mapping", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_type",
     "peft_version", "revision")
)  # fmt: skip
"""Settings of an adapter_config.json whose values make no difference for Covey."""


def _read_config(folder: Path) -> Any:
    """Return the configuration of a saved LoRA adapter, made from the settings in KEYS alone.

    Raise ModelError if another setting that the installed peft knows differs from its default.
    """
    peft = _peft()
    file = folder / ADAPTER_CONFIG
    read = json.loads(file.read_text(encoding="utf-8"))
    kind = read.get("peft_type")
    if kind != "LORA":
        name = printable_line(str(kind), 40)
        raise ModelError(f"model: {folder} is a {name} adapter; Covey supports only LoRA adapters")
    defaults = peft.LoraConfig().to_dict()
    for key in sorted(read.keys() & defaults.keys() - KEYS - UNUSED):
        if read[key] and read[key] != defaults[key]:
            raise ModelError(
                f"model: the adapter {folder} sets {key} in {ADAPTER_CONFIG}, which Covey does not "
                "support; Covey supports only plain LoRA adapters"
            )
    return peft.LoraConfig(**{key: read[key] for key in KEYS & read.keys() & defaults.keys()})


class GradientDropout(nn.Dropout):
    """Dropout that is active only in forward passes with a gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply dropout if gradients are enabled; the caller must seed torch before every pass."""
        return super().forward(input) if torch.is_grad_enabled() else input


def set_dropout(model: LanguageModel, share: float) -> None:
    """Set the LoRA dropout rate, which applies only to forward passes with a gradient."""
    model.adapter.lora_dropout = share
    for module in model.model.modules():
        if isinstance(drops := getattr(module, "lora_dropout", None), nn.ModuleDict):
            drops[NAME] = GradientDropout(share) if share else nn.Identity()


def _peft() -> Any:
    check_peft()
    import peft

    return peft


def _inject(model: LanguageModel, config: Any) -> LanguageModel:
    # peft handles this too, but with a warning.
    config.fan_in_fan_out = any(type(m).__name__ == CONV for m in model.model.modules())
    try:
        with warnings.catch_warnings():
            # The head shares its weights with the embedding; merging separates the two.
            warnings.simplefilter("ignore")
            _peft().inject_adapter_in_model(config, model.model, NAME)
    except ValueError as error:
        raise ConfigError(f"config: adapter: {str(error).splitlines()[0]}") from None
    if not isinstance(config.target_modules, str):  # the order of a set differs between processes
        config.target_modules = sorted(config.target_modules)
    model.model.requires_grad_(False)
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(".lora_" in name or f".modules_to_save.{NAME}." in name)
    if model.fused:
        fuse_adapters(model.backbone, NAME)
    return replace(model, adapter=config, head=replace(model.head, linear=_head(model, True)))


def _modules(model: LanguageModel, name: str, field: str) -> dict[str, nn.Module]:
    """Return the modules whose full name ends with a name from the configuration."""
    modules = dict(model.model.named_modules())
    found = {key: m for key, m in modules.items() if f".{key}".endswith(f".{name}")}
    if not found:
        known = {key.rpartition(".")[2] for key in modules if modules[key]._parameters}
        hint = nearest(name, known)
        raise ConfigError(f"config: adapter.{field}: the model has no layer {name!r}{hint}")
    return found


def _check_targets(model: LanguageModel, targets: Sequence[str]) -> None:
    # Covey multiplies by the head's weight directly, chunk by chunk, so the head has no adapter.
    head = model.model.get_output_embeddings()
    for name in targets:
        found = _modules(model, name, "targets").values()
        linear = (isinstance(m, nn.Linear) or type(m).__name__ == CONV for m in found)
        if not all(linear) or head in found:
            raise ConfigError(
                f"config: adapter.targets: {name!r} is not a linear layer of the backbone; to "
                f"train all weights of {name!r}, list it in adapter.also_train"
            )


def _modules_to_copy(model: LanguageModel, also_train: Sequence[str]) -> list[str]:
    """Return the full names of `also_train` modules, because peft treats short names as
    suffixes."""
    names: set[str] = set()
    for name in also_train:
        found = _modules(model, name, "also_train")
        if any(m._modules or not m._parameters for m in found.values()):
            raise ConfigError(
                f"config: adapter.also_train: {name!r} must be a single layer, not a group of "
                "layers"
            )
        names.update(found)
    return sorted(names)


def _head(model: LanguageModel, on: bool) -> Any:
    """Return the output layer.

    If the adapter contains a trained copy of the output layer, `on` chooses between the trained
    copy and the original layer.
    """
    layer = model.model.get_output_embeddings()
    if not hasattr(layer, "modules_to_save"):
        return layer
    return layer.modules_to_save[NAME] if on else layer.original_module


def adapted_layers(model: LanguageModel) -> list[tuple[str, Any]]:
    """Return the name and the module of each layer that has LoRA weights."""
    return [(name, m) for name, m in model.model.named_modules() if hasattr(m, "lora_A")]


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


@contextmanager
def adapter_off(model: LanguageModel) -> Iterator[LanguageModel]:
    """Yield the model with its adapter turned off, so that it computes with the base weights.

    The yielded model shares its modules with `model`, so the adapter of `model` is off too inside
    the `with` block.
    """
    layers = [
        m
        for m in model.model.modules()
        if hasattr(m, "enable_adapters") and getattr(m, "disable_adapters", None) is False
    ]
    trained = _trained(model.model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield replace(model, adapter=None, head=replace(model.head, linear=_head(model, False)))
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # peft makes every adapter that it enables trainable.
        model.model.requires_grad_(False)
        for _, parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def perturbed_adapter(model: LanguageModel) -> Iterator[None]:
    """Change the LoRA weights inside a `with` block, and restore them afterwards.

    A parity check needs changed weights: in a new adapter, the LoRA matrix B is 0, so the adapter
    has no effect.
    """
    parameters = [] if model.adapter is None else _trained(model.backbone)
    before = [p.detach().clone() for _, p in parameters]
    try:
        with torch.no_grad():
            for _, p in parameters:
                places = torch.arange(p.numel(), device=p.device, dtype=torch.float32)
                p.add_((0.1 * torch.sin(places)).view_as(p))
        yield
    finally:
        with torch.no_grad():
            for (_, p), saved in zip(parameters, before, strict=True):
                p.copy_(saved)


def _file_name(parameter: str) -> str:
    """Return the name that peft's files use for a parameter."""
    plain = parameter.replace(f".modules_to_save.{NAME}.", ".").replace(f".{NAME}.", ".")
    return f"base_model.model.{plain}"


def named_weights(
    model: LanguageModel, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights of an adapter file under the names of the model's parameters."""
    pairs = ((name, _file_name(name)) for name, _ in _trained(model.model))
    return {name: saved[file_name] for name, file_name in pairs if file_name in saved}


def save_adapter(model: LanguageModel, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Save the adapter in peft's format, with the given weights."""
    tensors = {_file_name(name): w.detach().contiguous() for name, w in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    assert model.adapter is not None
    model.adapter.save_pretrained(str(folder))
