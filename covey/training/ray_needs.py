"""The Ray actors of a run, and the CPUs and GPUs that they need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from covey.cluster.ray_client import Actors, Need
from covey.config import Config
from covey.config.schema import Cluster


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
    """Return whether Ray has to start the trainer ranks.

    The result is False if this process is already a rank.
    """
    return bool(config.cluster.address and config.cluster.trainers) and "RANK" not in os.environ


def run_in_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Let Ray start trainer ranks that run a covey command; return its exit code."""
    from covey.cluster.ray_client import check_room, connect
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
