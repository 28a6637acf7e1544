"""Start trainer ranks with Ray, as set in the [cluster] section."""

from __future__ import annotations

import os
from collections.abc import Sequence

from covey.config import Config
from covey.training.ray_needs import actors_of_a_run


def ray_starts_ranks(config: Config) -> bool:
    """Return whether Ray has to start the trainer ranks.

    The result is False if this process is already a rank.
    """
    return bool(config.cluster.address and config.cluster.trainers) and "RANK" not in os.environ


def run_in_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Run a command of covey in the trainer ranks of [cluster]; return its exit code."""
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
