"""What the loop tells while it runs, and the numbers of a step that come from its rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from covey.evaluate.evaluate import Evaluation
from covey.objective.advantage import zero_variance
from covey.objective.masked import row_mean
from covey.rollout.collect import Collected
from covey.rollout.filter import Selected
from covey.types import Batch, Group, Rollout

if TYPE_CHECKING:
    from covey.rollout.gather import Gathered


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


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Return the metrics of all answers of a step, learned from or not."""
    rollouts = collected.rollouts
    scored = [r for r in rollouts if r.reward is not None]
    rewards = np.array([r.reward for r in scored], dtype=float)
    metrics = {
        "objective/scores": float(rewards.mean()),
        "objective/reward_std": float(rewards.std()),
        "objective/success": _mean([float(bool(r.success)) for r in scored]),
        "objective/unscored": len(rollouts) - len(scored),
        "rollout/zero_variance_groups": _zero_variance_share(collected.groups),
        "rollout/stop_rate": _mean([float(r.finish == "stop") for r in rollouts]),
    }
    for name in sorted({name for r in scored for name in r.parts}):
        metrics[f"objective/parts/{name}"] = _mean(
            [r.parts[name] for r in scored if name in r.parts]
        )
    return metrics | _length_metrics(rollouts)


def selection_metrics(gathered: Gathered) -> dict[str, float]:
    """Return what was left out, and how often answers were sampled."""
    selected = gathered.selected
    return {
        "rollout/dropped_unscored": selected.unscored,
        "rollout/dropped_stale": selected.stale,
        "rollout/dropped_uniform": selected.uniform,
        "rollout/dropped_surplus": selected.surplus,
        "rollout/trained_groups": len(selected.groups),
        "rollout/rounds": gathered.rounds,
    }


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


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(r.tokens) for r in rollouts]
    metrics = {
        "rollout/lengths": _mean(lengths),
        "rollout/lengths_min": min(lengths),
        "rollout/lengths_max": max(lengths),
    }
    for name, success in (("solved", True), ("unsolved", False)):
        some = [len(r.tokens) for r in rollouts if r.success is success]
        if some:
            metrics[f"rollout/lengths_{name}"] = _mean(some)
    return metrics


def _zero_variance_share(groups: Sequence[Group]) -> float:
    rows = [(n, math.nan if r.reward is None else r.reward) for n, g in enumerate(groups)
            for r in g.rollouts]  # fmt: skip
    index, rewards = zip(*rows, strict=True)
    group = torch.tensor(index)
    flat = zero_variance(torch.tensor(rewards, dtype=torch.float64), group)
    return len(group[flat].unique()) / len(groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
