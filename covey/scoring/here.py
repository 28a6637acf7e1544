"""Judging in this process, at once: for rewards that take microseconds."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from covey.rewards.score import Reward
from covey.scoring.verdict import Job, Verdict, judge


@dataclass(frozen=True, slots=True)
class Here:
    """Judges while the caller waits. There is no time limit."""

    reward: Reward
    identity: str = ""

    @property
    def whole_groups(self) -> bool:
        """Whether the reward judges all answers of a group in one call."""
        return bool(getattr(self.reward, "whole_groups", False))

    def submit(self, job: Job) -> Future[list[Verdict]]:
        """Judge a job."""
        future: Future[list[Verdict]] = Future()
        future.set_result(judge(self.reward, job))
        return future

    def close(self) -> None:
        """There is nothing to close."""
