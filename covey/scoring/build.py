"""Make a reward's scorer: inline if the reward is quick, otherwise a process pool."""

from __future__ import annotations

import os
from dataclasses import dataclass

from covey.errors import ConfigError
from covey.rewards.identity import identity
from covey.rewards.score import Reward, max_seconds
from covey.scoring.job import Job, Pending, Scorer, ScoreResult, score_job
from covey.scoring.pool import Pool


@dataclass(frozen=True, slots=True)
class _Done:
    """Finished results.

    This class replaces `Future`, whose locks would take as much time as a quick reward.
    """

    results: list[ScoreResult]

    def result(self) -> list[ScoreResult]:
        return self.results


@dataclass(frozen=True, slots=True)
class InlineScorer:
    """A scorer that runs the reward in this process, without a time limit. The caller waits."""

    reward: Reward
    identity: str = ""

    @property
    def whole_groups(self) -> bool:
        """Whether the reward scores all completions of a group in one call."""
        return bool(getattr(self.reward, "whole_groups", False))

    def submit(self, job: Job) -> Pending:
        """Score a job at once and return its results."""
        return _Done(score_job(self.reward, job))

    def events(self) -> list[str]:
        """Return an empty list, because this scorer has no worker processes to report on."""
        return []

    def close(self) -> None:
        """Do nothing, because this scorer has no worker processes."""


def make_scorer(
    name: str, reward: Reward, *, workers: int = 0, timeout: float = 30.0, gigabytes: float = 8.0
) -> Scorer:
    """Return an inline scorer for a quick reward, or a pool of workers for any other reward.

    If `workers` is 0, the pool has one worker per core. The pool starts at once, so that Covey
    reports early if the workers cannot load the reward.
    """
    reward_identity = identity(name, reward)
    if reward.quick:
        return InlineScorer(reward, reward_identity)
    check_timeout(name, reward, timeout)
    workers = workers or os.cpu_count() or 1
    pool = Pool(reward, reward_identity, workers=workers, timeout=timeout, gigabytes=gigabytes)
    pool.start()
    return pool


def check_timeout(name: str, reward: Reward, timeout: float) -> None:
    """Raise ConfigError if scoring.timeout is shorter than the reward's own time limit."""
    longest = max_seconds(reward)
    if timeout < longest:
        raise ConfigError(
            f"config: scoring.timeout = {timeout:g} is less than the {longest:g} seconds that the "
            f"reward {name} may take; raise scoring.timeout, or lower the reward's option "
            "total_seconds if it has this option"
        )
