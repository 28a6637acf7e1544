"""What the loop tells while it runs, and the numbers of a step that come from its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from covey.collect import Collected
from covey.evaluate import Evaluation
from covey.objective.advantage import zero_variance
from covey.train.select import Selected
from covey.types import Batch, Rollout


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


def rollout_metrics(collected: Collected, batch: Batch) -> dict[str, float]:
    """Return the metrics of a step that need no model."""
    rollouts = [r for group in collected.groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = np.array([r.reward for r in scored], dtype=float)
    metrics = {
        "objective/scores": float(rewards.mean()),
        "objective/reward_std": float(rewards.std()),
        "objective/success": _mean([float(bool(r.success)) for r in scored]),
        "objective/unscored": len(rollouts) - len(scored),
        "val/zero_variance_groups": _zero_variance_share(batch),
        "val/stop_rate": _mean([float(r.finish == "stop") for r in rollouts]),
    }
    for name in sorted({name for r in scored for name in r.parts}):
        metrics[f"objective/parts/{name}"] = _mean([r.parts.get(name, 0.0) for r in scored])
    return metrics | _length_metrics(rollouts)


def mean_advantages(
    collected: Collected, selected: Selected, batch: Batch
) -> list[list[float | None]]:
    """Return the mean advantage of every answer, group by group; None where it was left out."""
    assert batch.advantage is not None
    tokens = batch.mask.sum(dim=1).clamp(min=1)
    rows = iter((batch.advantage.sum(dim=1) / tokens).tolist())
    kept = {group.prompt.id for group in selected.groups}
    return [
        [next(rows) if group.prompt.id in kept else None for _ in group.rollouts]
        for group in collected.groups
    ]


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(r.tokens) for r in rollouts]
    metrics = {
        "val/sequence_lengths": _mean(lengths),
        "val/sequence_lengths_min": min(lengths),
        "val/sequence_lengths_max": max(lengths),
    }
    for name, success in (("solved", True), ("unsolved", False)):
        some = [len(r.tokens) for r in rollouts if r.success is success]
        if some:
            metrics[f"val/sequence_lengths_{name}"] = _mean(some)
    return metrics


def _zero_variance_share(batch: Batch) -> float:
    flat = zero_variance(batch.rewards, batch.group)
    groups = batch.group.unique()
    return len(batch.group[flat].unique()) / len(groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
