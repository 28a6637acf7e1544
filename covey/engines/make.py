"""Builds the engine of a run from the configuration and the policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from covey.cluster.actors import actors_of_a_rank, ray_engine, settings_of_copy
from covey.cluster.ray_client import check_room, connect
from covey.config import Config, parse_config
from covey.embedded import MODELS
from covey.engines.native.backend import MODEL_PRECISION, Precision
from covey.engines.native.engine import NativeCopy, NativeEngine
from covey.engines.native.llama_decoder import LlamaDecoder, UnsupportedModel
from covey.engines.process.engine import ProcessEngine
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import Engine, EngineInfo, RequestSource, WeightSource
from covey.errors import ConfigError
from covey.models.device import device_of
from covey.models.load_model import NO_CODE
from covey.policy.policy import Policy, load_model


def check_engine(config: Config) -> None:
    """Connect to Ray if the run needs it; raise an error if the cluster has too little room."""
    if config.cluster.address and config.cluster.trainers and "RANK" not in os.environ:
        raise ConfigError(
            f"config: cluster.trainers = {config.cluster.trainers} works only with the commands "
            "`covey train` and `covey sft`; start the ranks with torchrun, or set "
            "cluster.trainers = 0"
        )
    if config.cluster.any_actors:
        connect(config.cluster.address, config.cluster.trainer_gpus)
        check_room(actors_of_a_rank(config))


def make_engine(config: Config, policy: Policy) -> Engine:
    """Build the engine that generates completions with the policy's weights."""
    model, kind = policy.whole or policy.model, config.engine.kind
    cuda = model.device.type == "cuda"
    engine: Engine
    if config.cluster.engine_actors:
        engine = ray_engine(config, model)
    elif kind == "native":
        return native_engine(policy, precision_of(config))
    elif kind == "vllm":
        from covey.engines.vllm.build import vllm_engine

        engine = vllm_engine(config, model, cuda=cuda)
    else:
        own = config.engine.device
        shared = SharedWeights.allocate(policy.weights(), on_gpu=cuda and own != "cpu")
        shared.write(policy.weights())
        device = config.model.device if own == "auto" else own
        settings = settings_of_copy(config, device=device)
        engine = ProcessEngine("covey.engines.process.start", settings, shared)
    return engine if policy.whole is None else WholeCopy(engine, NativeCopy(policy.whole))


def native_engine(policy: Policy, precision: Precision = MODEL_PRECISION) -> NativeEngine:
    """Return a native engine in this process; for a sharded policy, it uses an unsharded copy."""
    if policy.whole is None:
        return NativeEngine(policy.model, precision)
    return NativeCopy(policy.whole, precision)


def native_copy(settings: Mapping[str, Any]) -> NativeCopy:
    """Build a native engine with its own copy of the model, in a process other than the trainer."""
    config = parse_config(settings)
    return NativeCopy(load_model(config), precision_of(config))


def precision_of(config: Config) -> Precision:
    """Return whether the native engine uses float8 in matrix products and in the KV cache."""
    engine = config.engine
    return Precision(products=engine.dtype == "float8", cache=engine.kv_dtype == "float8")


# Checks of a float8 engine, before a run starts.

LEAST_CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU for float8 matrix products."""


def check_float8(config: Config) -> None:
    """Raise ConfigError if the engine's device or model does not support float8."""
    setting = f"config: engine.{config.engine.rounds} = 'float8'"
    if not config.cluster.engine_actors:  # actors may run on other machines
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


# A full copy of a sharded policy, for engines that have their own weights.
#
# Checkpoints of a sharded policy are written from an unsharded copy of its weights. The native
# engine generates with this copy and therefore updates it. For other engines, `WholeCopy` updates
# the copy.


@dataclass(slots=True)
class WholeCopy:
    """Wraps an engine, and updates an unsharded copy of the policy along with the engine."""

    engine: Engine
    copy: NativeCopy

    @property
    def info(self) -> EngineInfo:
        """Properties of the wrapped engine."""
        return self.engine.info

    @property
    def preemptions(self) -> int:
        """The wrapped engine's number of preemptions so far."""
        return self.engine.preemptions

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""
        self.engine.run(requests)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Update the unsharded copy of the policy, and send the changed weights to the engine."""
        changed: list[str] = []

        def noted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, weight in weights():
                changed.append(name)
                yield name, weight

        self.copy.load_weights(noted, version)
        own = dict(self.copy.model.model.named_parameters())
        self.engine.load_weights(lambda: [(name, own[name]) for name in changed], version)

    def events(self) -> list[str]:
        """Return the wrapped engine's new events, such as repaired failures."""
        return self.engine.events()

    def close(self) -> None:
        """Free the wrapped engine's resources."""
        self.engine.close()
