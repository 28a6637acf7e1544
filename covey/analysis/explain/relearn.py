"""Repeats a recorded training step, and records the gradient of every token."""

from __future__ import annotations

from dataclasses import replace

import torch

from covey.analysis.explain.effect import effect
from covey.analysis.explain.recorded import Recorded, Trainee
from covey.objective import Objective
from covey.objective.rollouts import joined
from covey.training.step import Seen, training_step
from covey.types import Batch

Watched = dict[str, torch.Tensor]
"""Maps the name of each observed quantity to a tensor [B, T] with one value per token. The values
come from the last optimizer step that trains on the token. The quantities are logp, entropy,
weight, and the fields of `Effect` except `loss`. The entry `number` [B] is the index of the last
optimizer step that trains on each row, counted from 0.
"""


def relearn(trainee: Trainee, recorded: Recorded) -> tuple[Batch, Watched, dict[str, float]]:
    """Repeat the optimizer steps of a recorded training step.

    Return the batch, the values of its tokens, and the metrics.
    """
    state = trainee.state
    state.step = recorded.step
    beta = recorded.metrics.get("objective/beta")
    state.beta = state.beta if beta is None else beta
    learner = trainee.learner_now()
    settings = replace(learner.settings, skip_zero_gradient=False)
    if not trainee.origin.exact:
        # With other weights, recorded log-probs would look like a change of the policy.
        settings = replace(settings, old_logp_from_sampler=False)
    learner = replace(learner, settings=settings)
    seen: list[Seen] = []
    batch, metrics, state.beta = training_step(
        learner, recorded.groups, recorded.step, watch=seen.append
    )
    assert batch is not None, "there are groups"
    watched: Watched = {"number": torch.zeros_like(batch.lengths)}
    for one in seen:
        _record(watched, learner.objective, batch, one)
    return *_by_rollout(batch, watched), metrics


def _by_rollout(batch: Batch, watched: Watched) -> tuple[Batch, Watched]:
    """Return the batch and the observed values, with one row for each rollout."""
    rollouts = joined(batch)
    if rollouts.batch is batch:
        return batch, watched
    assert batch.rollout is not None
    assert rollouts.batch.rollout is not None
    first = [(batch.rollout == number).nonzero()[0, 0] for number in rollouts.batch.rollout]
    tokens = {name: rollouts.join(v) for name, v in watched.items() if v.ndim == 2}
    return rollouts.batch, {**tokens, "number": watched["number"][torch.stack(first)]}


def _record(watched: Watched, objective: Objective, batch: Batch, seen: Seen) -> None:
    watched["number"][seen.rows] = seen.number
    found = effect(objective, seen.micro, seen.now)
    now = {"logp": seen.now.logp, "entropy": seen.now.entropy, "weight": seen.micro.weight}
    for name, value in {**now, **found._asdict()}.items():
        if value is not None and name != "loss":
            dtype = torch.int64 if name == "clipped" else torch.float64
            blank = torch.zeros_like(batch.mask, dtype=dtype)
            watched.setdefault(name, blank)[seen.rows, : value.shape[1]] = value.to(dtype)
