"""What a step does once its answers are judged: from groups to weights that have changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from covey.config import Config
from covey.objective import Objective, next_beta, with_advantage
from covey.reference import Reference
from covey.rollout.filter import without_truncated
from covey.training.collate import collate
from covey.training.finite_checks import check_finite
from covey.training.policy import Policy
from covey.training.state import State
from covey.training.update import UpdateSettings, Watch, prepare, update
from covey.types import Batch, Group


class Learner(Protocol):
    """The parts of a run that learning needs."""

    @property
    def config(self) -> Config:
        """Whether answers that were cut off are trained."""

    @property
    def policy(self) -> Policy:
        """Who learns."""

    @property
    def objective(self) -> Objective:
        """What is learned."""

    @property
    def reference(self) -> Reference | None:
        """Whom to stay near to."""


def objective_now(learner: Learner, state: State) -> Objective:
    """Return the objective with the beta of this step, which may be adaptive."""
    return replace(learner.objective, beta=state.beta)


def batch_of(
    learner: Learner, groups: Sequence[Group], state: State, settings: UpdateSettings
) -> Batch:
    """Collate groups, and fill in all that is taken over the whole batch."""
    objective = objective_now(learner, state)
    batch = collate(groups, learner.policy.model.device)
    known_first = settings.skips_rows(objective) and not objective.reads_old_policy
    if known_first:
        batch = with_advantage(objective, batch)
    batch = prepare(
        batch,
        policy=learner.policy,
        objective=objective,
        reference=learner.reference,
        settings=settings,
    )
    check_finite(batch, state.step)
    if not known_first:
        batch = with_advantage(objective, batch)
    return without_truncated(batch) if learner.config.filter.mask_truncated else batch


def learn(
    learner: Learner,
    groups: Sequence[Group],
    state: State,
    settings: UpdateSettings,
    watch: Watch | None = None,
) -> tuple[Batch | None, dict[str, float]]:
    """Take the optimizer steps of a step; return the batch they saw, and their metrics."""
    if not groups:
        return None, {}
    objective = objective_now(learner, state)
    batch = batch_of(learner, groups, state, settings)
    metrics = update(
        batch,
        policy=learner.policy,
        objective=objective,
        reference=learner.reference,
        settings=settings,
        step=state.step,
        watch=watch,
    )
    if objective.needs_reference:
        metrics["objective/beta"] = state.beta
        kl = _mean_kl(objective, batch, metrics)
        if math.isfinite(kl):
            state.beta = next_beta(objective, kl, answers=len(batch))
    return batch, metrics


def _mean_kl(objective: Objective, batch: Batch, metrics: Mapping[str, float]) -> float:
    """Return the KL of a step; NaN if every answer was masked, or a pass has gone wrong.

    Where it is in the reward, answers without advantage may have been left out of the metrics.
    """
    if batch.token_penalty is None or not batch.mask.any():
        return metrics.get("objective/kl_avg", math.nan)
    return float(batch.token_penalty[batch.mask].mean()) / objective.beta
