"""Build the engine of a run, and the scorers and references that run in Ray actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

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
from covey.models.from_pretrained import NO_CODE
from covey.models.language_model import LanguageModel
from covey.reference import Reference
from covey.reference.frozen import FrozenReference
from covey.rewards import Reward
from covey.scoring import Scorer
from covey.training.policy import Policy
from covey.training.ray_needs import actors_of_a_rank, engine_need, scoring_need

Load = Callable[[Config], LanguageModel]
"""Type of functions that load the model of a configuration, such as build.load_model."""


def check_engine(config: Config) -> None:
    """Raise an error, before loading a model, if the engine or Ray cluster is unavailable."""
    if config.engine.rounds:
        check_float8(config)
    if config.engine.kind == "vllm":
        from covey.engines.vllm.check import check_vllm

        check_vllm(config)
    if config.cluster.address and config.cluster.trainers and "RANK" not in os.environ:
        raise ConfigError(
            f"config: cluster.trainers = {config.cluster.trainers} works only with the commands "
            "`covey train` and `covey sft`; start the ranks with torchrun, or set "
            "cluster.trainers = 0"
        )
    if config.cluster.any_actors:
        from covey.cluster.ray_client import check_room, connect

        connect(config.cluster.address, config.cluster.trainer_gpus)
        check_room(actors_of_a_rank(config))


def make_engine(config: Config, policy: Policy, load: Load) -> Engine:
    """Build the engine that generates completions with the policy's weights."""
    if config.engine.kind == "native" and not config.cluster.engine_actors:
        return native_engine(policy, precision_of(config))
    engine = _engine_elsewhere(config, policy, load)
    return engine if policy.whole is None else WholeCopy(engine, NativeCopy(policy.whole))


def _engine_elsewhere(config: Config, policy: Policy, load: Load) -> Engine:
    """Build an engine with its own copy of the weights."""
    model = policy.model if policy.whole is None else policy.whole
    if config.cluster.engine_actors:
        return _ray_engine(config, model, load)
    if config.engine.kind == "vllm":
        from covey.engines.vllm.build import vllm_engine

        return vllm_engine(config, model, cuda=model.device.type == "cuda")
    here = model.device.type == "cuda" and config.engine.device != "cpu"
    shared = SharedWeights.allocate(policy.weights(), on_gpu=here)
    shared.write(policy.weights())
    return ProcessEngine("covey.training.engine_worker", config.model_dump(), shared)


def native_engine(policy: Policy, precision: Precision = MODEL_PRECISION) -> NativeEngine:
    """Return a native engine that runs in this process.

    If the policy is sharded, the engine has a full copy of the model.
    """
    if policy.whole is None:
        return NativeEngine(policy.model, precision)
    return NativeCopy(policy.whole, precision)


def precision_of(config: Config) -> Precision:
    """Return whether the native engine uses float8 in matrix products and in the KV cache."""
    engine = config.engine
    return Precision(products=engine.dtype == "float8", cache=engine.kv_dtype == "float8")


def _ray_engine(config: Config, model: LanguageModel, load: Load) -> Engine:
    from covey.cluster.engine import RayEngine

    cluster = config.cluster
    dtype = str(model.head.linear.weight.dtype).removeprefix("torch.")
    on_gpu = cluster.engine_gpus > 0
    settings = _changed(config, dtype=dtype, device="cuda" if on_gpu else "cpu")
    threads = 0 if on_gpu else max(1, int(cluster.engine_cpus))
    return RayEngine(
        build=partial(actor_engine, settings, load),
        engines=cluster.engines,
        most=max(cluster.engines, cluster.max_engines),
        need=engine_need(config),
        threads=threads,
        restarts=cluster.restarts,
        patience=cluster.patience,
    )


def _changed(config: Config, **model: Any) -> dict[str, Any]:
    """Return the settings with changes in [model] and gradient checkpointing turned off."""
    data = config.model_dump()
    return {**data, "model": {**data["model"], **model, "gradient_checkpointing": False}}


def actor_engine(settings: Mapping[str, Any], load: Load) -> Engine:
    """Build the engine of a Ray actor; this function runs inside the actor."""
    config = parse_config(settings)
    if config.engine.kind != "vllm":
        return NativeCopy(load(config), precision_of(config))
    from covey.engines.vllm.build import vllm_engine

    # The server uses the GPU. The actor needs a model only for the tokenizer and the probe.
    model = load(parse_config(_changed(config, device="cpu")))
    return vllm_engine(config, model, cuda=config.model.device == "cuda", first_gpu=0)


def ray_scorer(config: Config, reward: Reward, identity: str) -> Scorer:
    """Build a scorer whose workers are Ray actors."""
    from covey.cluster.scoring import RayScorer

    return RayScorer(
        reward=reward,
        identity=identity,
        actors=config.cluster.scoring_actors,
        need=scoring_need(config),
        settings={
            "workers": config.scoring.workers or 1,
            "timeout": config.scoring.timeout,
            "gigabytes": config.scoring.gigabytes,
        },
        restarts=config.cluster.restarts,
    )


def ray_reference(config: Config, load: Load) -> Reference:
    """Return a frozen reference that runs in a Ray actor."""
    from covey.cluster.reference import RayReference

    if config.reference.kind != "frozen" or config.adapter.rank:
        raise ConfigError(
            "config: cluster.reference_actor = true needs reference.kind = 'frozen' and no "
            "adapter, because other references change with the policy or use the policy's weights"
        )
    settings = _changed(config, device="cuda" if config.cluster.engine_gpus else "cpu")
    return RayReference(
        build=partial(actor_reference, settings, load),
        need=engine_need(config),
        restarts=config.cluster.restarts,
    )


def actor_reference(settings: Mapping[str, Any], load: Load) -> Reference:
    """Build the reference of a Ray actor; this function runs inside the actor."""
    config = parse_config(settings)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return FrozenReference(
        model=load(config),
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
    )


# Float8 in the engine: checks before a run starts, and a note about the loss of precision.

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


# Keep a full copy of a sharded policy, for engines that have their own weights.
#
# Checkpoints of a sharded policy are written from a full, unsharded copy of its weights. The
# native engine generates with the full copy, and therefore updates the copy. For other engines,
# the class `WholeCopy` updates the full copy.


@dataclass(slots=True)
class WholeCopy:
    """Wraps an engine; each weight update also updates a full copy of the sharded policy."""

    engine: Engine
    copy: NativeCopy

    @property
    def info(self) -> EngineInfo:
        """Properties of the wrapped engine."""
        return self.engine.info

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""
        self.engine.run(requests)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Update the full copy of the policy, and send changed weights to the engine."""
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
