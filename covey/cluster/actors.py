"""The Ray actors of a run: trainer ranks, engines, scoring workers and references.

Modules that need torch are imported inside functions, so that `covey plan` can count actors without
torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from covey.cluster.ray_client import Actors, Need, check_room, connect
from covey.config import Config, parse_config
from covey.config.schema import Cluster

if TYPE_CHECKING:
    from covey.engines.protocol import Engine
    from covey.models.language_model import LanguageModel
    from covey.reference import Reference
    from covey.rewards import Reward
    from covey.scoring import Scorer


def engine_need(config: Config) -> Need:
    """Return how many CPUs and GPUs an engine actor or a reference actor needs."""
    return Need(cpus=config.cluster.engine_cpus, gpus=config.cluster.engine_gpus)


def scoring_need(config: Config) -> Need:
    """Return how many CPUs a scoring actor needs: one per worker process."""
    return Need(cpus=config.scoring.workers or 1)


def actors_of_a_rank(config: Config) -> list[Actors]:
    """Return the kinds and numbers of Ray actors that each trainer rank starts."""
    cluster, engine = config.cluster, engine_need(config)
    return [
        Actors(name="engines", count=cluster.engines, need=engine),
        Actors(name="scoring workers", count=cluster.scoring_actors, need=scoring_need(config)),
        Actors(name="references", count=int(cluster.reference_actor), need=engine),
    ]


def actors_of_a_run(config: Config) -> list[Actors]:
    """Return the Ray actors of a run, beginning with the trainer ranks if Ray starts them."""
    cluster, each = config.cluster, actors_of_a_rank(config)
    if not cluster.trainers:
        return each
    rank = Need(cpus=cluster.trainer_cpus, gpus=cluster.trainer_gpus)
    return [
        Actors(name="trainer ranks", count=cluster.trainers, need=rank),
        *(replace(actors, count=actors.count * cluster.trainers) for actors in each),
    ]


def needs_text(config: Config) -> str:
    """Return a text about the actors, CPUs and GPUs that a run needs on Ray.

    The text is empty if all settings of [cluster] are defaults.
    """
    cluster = config.cluster
    if cluster == Cluster():
        return ""
    actors = [one for one in actors_of_a_run(config) if one.count]
    own = 0 if cluster.trainers else cluster.trainer_gpus
    cpus = sum(one.count * one.need.cpus for one in actors)
    gpus = own + sum(one.whole_gpus for one in actors)
    kinds = ", ".join(one.text for one in actors) or "no actors"
    trainer = f" ({own} for the trainer)" if own else ""
    when = "On Ray" if cluster.address else "With --ray"
    return f"{when}: {kinds}, which need {cpus:g} CPUs and {gpus:g} GPUs{trainer}."


# Start trainer ranks with Ray, as set in the [cluster] section.


def ray_starts_ranks(config: Config) -> bool:
    """Return whether Ray has to start the trainer ranks; False in a process that is a rank."""
    return bool(config.cluster.address and config.cluster.trainers) and "RANK" not in os.environ


def run_in_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Let Ray start trainer ranks that run a covey command; return the command's exit code."""
    from covey.cluster.trainers import run_ranks

    cluster, actors = config.cluster, actors_of_a_run(config)
    connect(cluster.address)
    check_room(actors)
    return run_ranks(
        arguments,
        ranks=cluster.trainers,
        need=actors[0].need,
        patience=cluster.patience,
        threads=max(1, int(cluster.trainer_cpus)),
    )


# Engines, scorers and references in Ray actors.


def ray_engine(config: Config, model: LanguageModel) -> Engine:
    """Build an engine that distributes requests over engines in Ray actors."""
    from covey.cluster.ray_engine import RayEngine

    cluster = config.cluster
    dtype = str(model.head.linear.weight.dtype).removeprefix("torch.")
    on_gpu = cluster.engine_gpus > 0
    settings = settings_of_copy(config, dtype=dtype, device="cuda" if on_gpu else "cpu")
    threads = 0 if on_gpu else max(1, int(cluster.engine_cpus))
    return RayEngine(
        build=partial(actor_engine, settings),
        engines=cluster.engines,
        most=max(cluster.engines, cluster.max_engines),
        need=engine_need(config),
        threads=threads,
        restarts=cluster.restarts,
        patience=cluster.patience,
    )


def settings_of_copy(config: Config, **model: Any) -> dict[str, Any]:
    """Return the settings for a copy of the model that is not trained.

    The keyword arguments override settings of the section [model].
    """
    data = config.model_dump()
    return {**data, "model": {**data["model"], **model, "gradient_checkpointing": False}}


def actor_engine(settings: Mapping[str, Any]) -> Engine:
    """Build the engine of a Ray actor; this function runs inside the actor."""
    from covey.engines.make import native_copy
    from covey.policy.policy import load_model

    config = parse_config(settings)
    if config.engine.kind != "vllm":
        return native_copy(settings)
    from covey.engines.vllm.build import vllm_engine

    # The server uses the GPU; the actor needs a model only for the tokenizer and the probe.
    model = load_model(parse_config(settings_of_copy(config, device="cpu")))
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


def ray_reference(config: Config) -> Reference:
    """Return a frozen reference that runs in a Ray actor."""
    from covey.cluster.ray_reference import RayReference

    settings = settings_of_copy(config, device="cuda" if config.cluster.engine_gpus else "cpu")
    return RayReference(
        build=partial(actor_reference, settings),
        need=engine_need(config),
        restarts=config.cluster.restarts,
    )


def actor_reference(settings: Mapping[str, Any]) -> Reference:
    """Build the reference of a Ray actor; this function runs inside the actor."""
    import torch

    from covey.policy.policy import load_model
    from covey.reference import FrozenReference

    config = parse_config(settings)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return FrozenReference(
        model=load_model(config),
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
    )
