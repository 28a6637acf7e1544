"""Scores completions in Ray actors, each with its own pool of worker processes.

If an actor dies, its replacement scores the unfinished completions again. A completion gets the
same result if it is scored twice, because a reward depends only on the completion.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from covey.cluster.ray_client import Need, answer, check_cluster, dead, reachable, translated
from covey.errors import RewardError
from covey.rewards.score import Reward
from covey.scoring import Job, Pool, ScoreResult

CALLS = 256
"""Maximum number of scoring jobs that an actor works on at the same time."""


class ScoringActor:
    """A Ray actor that scores completions in a pool of worker processes on its node."""

    def __init__(self, reward: Reward, identity: str, settings: dict[str, Any]) -> None:
        self.pool = Pool(reward, identity, **settings)
        self.pool.start()

    def score(self, job: Job) -> list[ScoreResult]:
        """Score a job."""
        return self.pool.submit(job).result()

    def pid(self) -> int:
        """Return the process id of the actor, for messages and tests."""
        return os.getpid()


@dataclass(slots=True, kw_only=True)
class RayScorer:
    """A scorer that distributes scoring jobs over actors."""

    reward: Reward
    identity: str
    actors: int
    need: Need
    settings: dict[str, Any]
    """The keyword arguments of each actor's `Pool`, such as the time limit."""
    restarts: int
    handles: list[Any] = field(default_factory=list, init=False)
    sent: int = field(default=0, init=False)
    died: int = field(default=0, init=False)
    happened: list[str] = field(default_factory=list, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.handles = [self._make() for _ in range(self.actors)]

    def _make(self) -> Any:
        arguments = self.reward, self.identity, self.settings
        return self.need.actor(ScoringActor, *arguments, max_concurrency=CALLS)

    @property
    def whole_groups(self) -> bool:
        """Whether a job must contain all completions of a group."""
        return bool(getattr(self.reward, "whole_groups", False))

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the reward."""
        return self.reward.bounds

    def submit(self, job: Job) -> RayScore:
        """Send a scoring job to the next actor, in round-robin order."""
        check_cluster()
        with self.lock:
            place = self.sent % self.actors
            self.sent += 1
            handle = self.handles[place]
        return RayScore(self, job, place, handle, handle.score.remote(job))

    def replace(self, place: int, handle: Any) -> Any:
        """Return the replacement of a dead actor.

        Start the replacement if no other thread has started it.
        """
        with self.lock:
            if self.handles[place] is handle:
                self.died += 1
                if self.died > self.restarts:
                    raise RewardError(
                        f"reward: the Ray actors that score completions died {self.died} times in "
                        "a row; `ray logs` shows why"
                    )
                self.handles[place] = self._make()
                self.happened.append(f"scoring worker {place + 1} died and was restarted")
            return self.handles[place]

    def events(self) -> list[str]:
        """Return messages about actors that were restarted since the last call."""
        with self.lock:
            happened, self.happened = self.happened, []
        return happened

    def close(self) -> None:
        """End all actors."""
        import ray

        for handle in self.handles if reachable() else ():
            ray.kill(handle)
        self.handles = []


@dataclass(slots=True)
class RayScore:
    """The pending result of a scoring job that was sent to an actor."""

    scorer: RayScorer
    job: Job
    place: int
    handle: Any
    reference: Any

    def result(self) -> list[ScoreResult]:
        """Wait for the scores. If the actor dies, send the job to its replacement."""
        import ray

        while True:
            try:
                results: list[ScoreResult] = answer(self.reference)
                self.scorer.died = 0
                return results
            except ray.exceptions.RayError as error:
                check_cluster(now=True)
                if not dead(error):
                    raise translated(error, f"scoring worker {self.place + 1}") from None
            self.handle = self.scorer.replace(self.place, self.handle)
            self.reference = self.handle.score.remote(self.job)
