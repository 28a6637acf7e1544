"""Mean advantages of the rollouts of a step, for the records of the run."""

from __future__ import annotations

from collections.abc import Sequence

from covey.objective.masked import row_sum
from covey.types import Batch, Group


def mean_advantages(
    collected: Sequence[Group], trained: Sequence[Group], batch: Batch | None
) -> list[list[float | None]]:
    """Return the mean advantage of every rollout, by group; None for rollouts not trained on.

    `trained` are the groups in the batch. `batch.rollout` has the index of each row's rollout.
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
