"""Judging in this process, at once: for rewards that take microseconds."""

from __future__ import annotations

from dataclasses import dataclass

from covey.rewards.score import Reward
from covey.scoring.result import Job, Pending, ScoreResult, judge


@dataclass(frozen=True, slots=True)
class _Known:
    """What is there already. A Future has locks, which take as long to make as a quick reward."""

    verdicts: list[ScoreResult]

    def result(self) -> list[ScoreResult]:
        return self.verdicts


@dataclass(frozen=True, slots=True)
class InlineScorer:
    """Judges while the caller waits. There is no time limit."""

    reward: Reward
    identity: str = ""

    @property
    def whole_groups(self) -> bool:
        """Whether the reward judges all answers of a group in one call."""
        return bool(getattr(self.reward, "whole_groups", False))

    def submit(self, job: Job) -> Pending:
        """Judge a job."""
        return _Known(judge(self.reward, job))

    def close(self) -> None:
        """There is nothing to close."""
