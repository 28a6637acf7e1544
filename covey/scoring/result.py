"""What became of judging an answer, and the judging itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.rewards.score import Reward, Score
from covey.types import Prompt

READY = "ready"
"""What a scoring process says when it has loaded the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Answers to one prompt: one of them, or a group for a reward that judges whole groups."""

    prompt: Prompt
    texts: tuple[str, ...]
    share: float
    """How much of the run is done, 0 to 1: weights of a reward may depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A score, or why there is none."""

    score: Score | None = None
    error: str = ""


class Pending(Protocol):
    """Verdicts that are known some time; a Future of them is one."""

    def result(self) -> list[ScoreResult]:
        """Wait for them."""


def judge(reward: Reward, job: Job) -> list[ScoreResult]:
    """Judge every answer of a job. Nothing that the reward does is an error here."""
    reward = at_share(reward, job.share)
    if getattr(reward, "whole_groups", False):
        try:
            score_group = reward.score_group  # type: ignore[attr-defined]
            return _verdicts(score_group(job.prompt, job.texts), job.texts)
        except Exception as error:
            return failed(error, job.texts)
    verdicts = []
    for text in job.texts:
        try:
            verdicts.append(checked(reward(job.prompt, text)))
        except Exception as error:  # a user's function may raise anything; it is counted
            verdicts += failed(error, [text])
    return verdicts


async def judge_async(reward: Any, job: Job) -> list[ScoreResult]:
    """Judge every answer of a job with a reward that can wait."""
    try:
        return _verdicts(await reward.score_group_async(job.prompt, job.texts), job.texts)
    except Exception as error:
        return failed(error, job.texts)


def _verdicts(scores: Sequence[Score | None], texts: Sequence[str]) -> list[ScoreResult]:
    """Accept the scores of a group. One that is none costs the others nothing."""
    if len(scores) != len(texts):
        raise ValueError(f"there are {len(scores)} scores for {len(texts)} answers")
    verdicts = []
    for score, text in zip(scores, texts, strict=True):
        try:
            verdicts.append(checked(score))
        except Exception as error:
            verdicts += failed(error, [text])
    return verdicts


def checked(score: Score | None) -> ScoreResult:
    """Accept a score, if it is one, as plain numbers, which any file can hold."""
    if score is None:
        raise ValueError("the function gave None")
    if not isinstance(score, Score):
        raise TypeError(f"a reward gives a Score, not {type(score).__name__}")
    if not math.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}")
    parts = {str(name): float(value) for name, value in score.parts.items()}
    for name, value in parts.items():
        if not math.isfinite(value):
            raise ValueError(f"the part {name} is {value}")
    return ScoreResult(
        score=Score(reward=float(score.reward), success=bool(score.success), parts=parts)
    )


def failed(error: Exception, texts: Sequence[str]) -> list[ScoreResult]:
    """Say why there is no score, once for every answer."""
    return [ScoreResult(error=f"{type(error).__name__}: {error}")] * len(texts)


def at_share(reward: Reward, share: float) -> Reward:
    """Return the reward as it is at this point of the run."""
    at = getattr(reward, "at", None)
    return reward if at is None else at(share)
