"""Float8 in the engine: checks before a run starts, and a note about the loss of precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from covey.config import Config
from covey.embedded import MODELS
from covey.engines.native.llama_decoder import LlamaDecoder, UnsupportedModel
from covey.errors import ConfigError
from covey.models.device import device_of
from covey.models.from_pretrained import NO_CODE

LEAST_CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU for float8 matrix products."""


def check_float8(config: Config) -> None:
    """Raise ConfigError if the engine's device or model does not support float8."""
    setting = f"config: engine.{config.engine.rounds} = 'float8'"
    if not config.cluster.engine_actors:  # whose devices are not those of this machine
        _check_device(config, setting)
    _check_architecture(config.model.path, setting)


def _check_device(config: Config, setting: str) -> None:
    own = config.engine.kind == "process" and config.engine.device != "auto"
    device = device_of(config.engine.device if own else config.model.device)
    if device.type != "cuda":
        raise ConfigError(f"{setting} needs an NVIDIA GPU, but the engine's device is {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise ConfigError(
            f"{setting} needs a GPU with compute capability 8.9 (Ada), 9.0 (Hopper) or higher, but "
            f"{name} has {version}"
        )


def _check_architecture(path: str, setting: str) -> None:
    """Raise ConfigError if the model's config.json describes an architecture other than Llama's."""
    folder = MODELS.get(path, Path(path))
    if not (folder / "config.json").is_file():
        return  # a GGUF file or a name on the hub: checked when the engine is built
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder, **NO_CODE)
    with torch.device("meta"):  # shapes without memory
        model = transformers.AutoModelForCausalLM.from_config(settings, **NO_CODE)
    try:
        LlamaDecoder(cast(Any, SimpleNamespace(backbone=model.base_model, model=model)))
    except (UnsupportedModel, AttributeError):
        raise ConfigError(
            f"{setting} needs a model with Llama's architecture, but {path} is a "
            f"{settings.model_type} model"
        ) from None


def lost_note(config: Config, metrics: Mapping[str, float]) -> str:
    """Return a one-line note on how much the log-probs of engine and trainer differ in a step."""
    gap, chi2 = (metrics[f"debug/sampler_{name}"] for name in ("logp_diff_mean", "chi2"))
    by = f"objective.correction = {config.objective.options.get('correction')!r}"
    if config.train.old_logp == "sampler":
        by = "the ratio to the engine's log-probs"
    return (
        f"engine.{config.engine.rounds} = 'float8': mean |logp - sampler_logp| {gap:.2g}, "
        f"effective sample size {1 / (1 + chi2):.1%}; {by} corrects for this, and `covey numerics` "
        "shows the causes"
    )
