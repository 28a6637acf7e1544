"""What the loop tells while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from covey.evaluate.evaluate import Evaluation
from covey.objective.masked import row_mean
from covey.rollout.collect import Collected
from covey.rollout.filter import Selected
from covey.types import Batch

FLAT_STEPS, FLAT_SHARE = 10, 0.9
"""Rewards no longer tell answers apart when this share of groups was flat over so many steps."""


class Reporter(Protocol):
    """Somebody who watches a run: a terminal, a log, nobody."""

    def started(self, *, steps: int, done: int, answers: int) -> None:
        """Training begins: `done` of `steps` steps lie behind, each of so many answers."""

    def sampled(self, answers: int) -> None:
        """So many more answers of the current step, or evaluation, are finished."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def note(self, text: str) -> None:
        """Something the user should read."""


def flat_rewards(shares: Sequence[float], metrics: Mapping[str, Any]) -> str | None:
    """Return a warning if rewards have stopped telling answers apart, and what to do about it."""
    if len(shares) < FLAT_STEPS or _mean(shares) <= FLAT_SHARE:
        return None
    right = metrics["objective/success"]
    if right > 0.9:
        remedy = "nearly all answers are right: the task is learned; stop, or ask harder prompts"
    elif right < 0.1:
        remedy = "nearly all answers are wrong: ask easier prompts, or reward partial success"
    else:
        remedy = (
            "answers to a prompt agree: raise rollout.temperature or rollout.group_size, make the "
            "reward finer, or set filter.dynamic_sampling = true"
        )
    return (
        f"rewards hardly tell answers apart: over {FLAT_STEPS} steps {_mean(shares):.0%} of groups "
        f"had equal rewards and taught nothing; {remedy}"
    )


def skipped_steps(metrics: Mapping[str, Any]) -> str | None:
    """Return a warning if optimizer steps were left out, and what to do about it."""
    skipped = metrics.get("optim/skipped", 0)
    if not skipped:
        return None
    return (
        f"{skipped} optimizer steps were left out: their gradient was not finite; if it goes on, "
        "lower optimizer.learning_rate or set model.dtype = 'float32'"
    )


def mean_advantages(
    collected: Collected, selected: Selected, batch: Batch | None
) -> list[list[float | None]]:
    """Return the mean advantage of every answer, group by group; None where it was left out."""
    kept = {group.prompt.id for group in selected.groups}
    rows: Iterator[float] = iter(())
    if batch is not None:
        assert batch.advantage is not None
        rows = iter(row_mean(batch.advantage, batch.mask).squeeze(1).tolist())
    return [
        [next(rows) if group.prompt.id in kept else None for _ in group.rollouts]
        for group in collected.groups
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
