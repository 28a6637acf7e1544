"""Who judges answers, and where."""

from __future__ import annotations

import os
from typing import Protocol

from covey.errors import ConfigError
from covey.rewards.identity import identity
from covey.rewards.score import Reward, max_seconds
from covey.scoring.build import InlineScorer
from covey.scoring.job import Pending
from covey.scoring.pool import Pool
from covey.scoring.result import Job


class Scorer(Protocol):
    """Takes jobs as answers are finished, and tells later, so that nobody has to wait."""

    @property
    def identity(self) -> str:
        """Name, version and source hash of the reward."""

    @property
    def whole_groups(self) -> bool:
        """Whether a job must hold all answers of a group."""

    def submit(self, job: Job) -> Pending:
        """Judge a job, some time."""

    def close(self) -> None:
        """End what was started."""


def make_scorer(
    name: str, reward: Reward, *, workers: int = 0, timeout: float = 30.0, gigabytes: float = 8.0
) -> Scorer:
    """Judge quick rewards here, and all others in `workers` processes; 0: one for each core.

    Processes are started at once, so that a reward that they cannot load is known at once.
    """
    who = identity(name, reward)
    if reward.quick:
        return InlineScorer(reward, who)
    check_timeout(name, reward, timeout)
    workers = workers or os.cpu_count() or 1
    pool = Pool(reward, who, workers=workers, timeout=timeout, gigabytes=gigabytes)
    pool.start()
    return pool


def check_timeout(name: str, reward: Reward, timeout: float) -> None:
    """Refuse a time limit that would end a reward before its own do: it would never say 0."""
    needed = max_seconds(reward)
    if timeout < needed:
        raise ConfigError(
            f"config: scoring.timeout = {timeout:g} is less than the {needed:g} seconds "
            f"that reward {name} may take by its own limits: raise it, or lower the reward's "
            "total_seconds if it has them"
        )
