"""Advantages of a step by rollout, and warnings about its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.objective.masked import row_sum
from covey.types import Batch, Group

FLAT_STEPS, FLAT_SHARE = 10, 0.9
"""A warning is due when this share of groups had equal rewards over this many steps."""


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
