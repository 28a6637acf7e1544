"""Build the engine of a run, and the scorers and references that run in Ray actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from covey.config import Config, parse_config
from covey.engines.native.engine import NativeCopy, NativeEngine
from covey.engines.native.precision import MODEL_PRECISION, Precision
from covey.engines.process.engine import ProcessEngine
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import Engine
from covey.engines.whole_copy import WholeCopy
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel
from covey.reference import Reference
from covey.reference.frozen import FrozenReference
from covey.rewards import Reward
from covey.scoring import Scorer
from covey.training.float8 import check_float8
from covey.training.policy import Policy
from covey.training.ray_needs import actors_of_a_rank, engine_need, scoring_need

Load = Callable[[Config], LanguageModel]
"""Type of covey.training.build.load_model, which loads a configuration's model."""


def check_engine(config: Config) -> None:
    """Raise an error before a model is loaded if the engine or the cluster is not available."""
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
    """Build the engine that generates completions of the policy."""
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
    """Return the precision of the native engine."""
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
    """Return the settings with changes in [model], and with gradient checkpointing off."""
    data = config.model_dump()
    return {**data, "model": {**data["model"], **model, "gradient_checkpointing": False}}


def actor_engine(settings: Mapping[str, Any], load: Load) -> Engine:
    """Build the engine inside a Ray actor."""
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
    """Build a frozen reference in a Ray actor."""
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
    """Build the reference inside a Ray actor."""
    config = parse_config(settings)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return FrozenReference(
        model=load(config),
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
    )
