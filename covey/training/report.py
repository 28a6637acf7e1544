"""Metrics of a step that come from its rollouts, and warnings about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.objective.advantage import zero_variance
from covey.objective.masked import row_sum
from covey.rollout.collect import Collected
from covey.run.trackers import Tracker
from covey.types import Batch, Group, Rollout

if TYPE_CHECKING:
    from covey.rollout.gather import Gathered


FLAT_STEPS, FLAT_SHARE = 10, 0.9
"""A warning is due when this share of groups had equal rewards over this many steps."""


Reporter = Tracker
"""What collecting groups reports to."""


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Return the metrics of all rollouts of a step, trained on or not."""
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
    """Return how many groups were dropped, by reason, and how many rounds were sampled."""
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
    """Return a warning if rewards hardly differ within groups any more, and what to do."""
    if len(shares) < FLAT_STEPS or _mean(shares) <= FLAT_SHARE:
        return None
    success = metrics["objective/success"]
    if success > 0.9:
        remedy = "nearly all completions succeed: the task is learned; stop, or use harder prompts"
    elif success < 0.1:
        remedy = "nearly all completions fail: use easier prompts, or reward partial success"
    else:
        remedy = (
            "completions of a prompt agree: raise rollout.temperature or rollout.group_size, make "
            "the reward finer, or set filter.dynamic_sampling = true"
        )
    return (
        f"rewards hardly differ within groups: over {FLAT_STEPS} steps {_mean(shares):.0%} of "
        f"groups had equal rewards and taught nothing; {remedy}"
    )


def skipped_steps(metrics: Mapping[str, Any]) -> str | None:
    """Return a warning if optimizer steps were skipped, and what to do about it."""
    skipped = metrics.get("optim/skipped", 0)
    if not skipped:
        return None
    return (
        f"{skipped} optimizer steps were skipped: their gradient was not finite; if this "
        "continues, lower optimizer.learning_rate or set model.dtype = 'float32'"
    )


def mean_advantages(
    collected: Sequence[Group], trained: Sequence[Group], batch: Batch | None
) -> list[list[float | None]]:
    """Return the mean advantage of every rollout, group by group; None where it was left out.

    `trained` are the groups of the batch, whose rows name their rollouts by number.
    """
    found: dict[int, float] = {}
    if batch is not None:
        assert batch.advantage is not None
        assert batch.rollout is not None
        rollouts = [rollout for group in trained for rollout in group.rollouts]
        sums = row_sum(batch.advantage, batch.mask).squeeze(1)
        tokens = batch.mask.sum(dim=1)
        total = sums.new_zeros(len(rollouts)).index_add(0, batch.rollout, sums)
        count = tokens.new_zeros(len(rollouts)).index_add(0, batch.rollout, tokens)
        means = (total / count.clamp(min=1)).tolist()
        found = {id(rollout): mean for rollout, mean in zip(rollouts, means, strict=True)}
    return [[found.get(id(rollout)) for rollout in group.rollouts] for group in collected]


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
