"""Start trainer ranks with Ray, as set in the [cluster] section."""

from __future__ import annotations

import os
from collections.abc import Sequence

from covey.config import Config
from covey.training.make_engine import actor_needs


def ray_starts_ranks(config: Config) -> bool:
    """Return whether Ray has to start the trainer ranks.

    The result is False if this process is already a rank.
    """
    return bool(config.cluster.address and config.cluster.trainers) and "RANK" not in os.environ


def run_in_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Run a command of covey in the trainer ranks of [cluster]; return its exit code."""
    from covey.cluster.ray_client import Need, check_room, connect
    from covey.cluster.trainers import run_ranks

    cluster = config.cluster
    need = Need(cpus=cluster.trainer_cpus, gpus=cluster.trainer_gpus)
    connect(cluster.address)
    actors = [(name, count * cluster.trainers, each) for name, count, each in actor_needs(config)]
    check_room([("trainer ranks", cluster.trainers, need), *actors])
    return run_ranks(
        arguments,
        ranks=cluster.trainers,
        need=need,
        patience=cluster.patience,
        threads=max(1, int(cluster.trainer_cpus)),
    )
