"""A recorded step, trained again while every token is observed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from covey.analysis.explain.effect import effect
from covey.analysis.explain.recorded import Recorded, Trainee
from covey.objective import Objective
from covey.objective.rollouts import joined
from covey.training.step import Seen, training_step
from covey.types import Batch


@dataclass(slots=True, kw_only=True)
class Watched:
    """Observations of every row of a batch in its last optimizer step, [B, T]."""

    batch: Batch
    objective: Objective
    number: torch.Tensor
    """[B]: which optimizer step, from 0."""
    logp: torch.Tensor
    entropy: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    entropy_gradient: torch.Tensor
    old_logp: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl: torch.Tensor | None = None

    @staticmethod
    def blank(batch: Batch, objective: Objective) -> Watched:
        """Return observations without any values yet."""
        zeros = torch.zeros(batch.mask.shape, dtype=torch.float64, device=batch.mask.device)
        return Watched(
            batch=batch,
            objective=objective,
            number=torch.zeros_like(batch.lengths),
            logp=zeros.clone(),
            entropy=zeros.clone(),
            weight=zeros.clone(),
            gradient=zeros.clone(),
            entropy_gradient=zeros.clone(),
            old_logp=zeros.clone(),
            ratio=zeros.clone(),
            clipped=zeros.long(),
        )

    def see(self, seen: Seen) -> None:
        """Record the effect of a micro-batch."""
        found = effect(self.objective, seen.micro, seen.now)
        width = seen.micro.mask.shape[1]
        self.number[seen.rows] = seen.number
        values = {
            "logp": seen.now.logp,
            "entropy": seen.now.entropy,
            "weight": seen.micro.weight,
            **found._asdict(),
        }
        if found.kl is not None and self.kl is None:
            self.kl = torch.zeros_like(self.logp)
        for name, value in values.items():
            if value is not None and name != "loss":
                target = getattr(self, name)
                target[seen.rows, :width] = value.to(target.dtype)

    def by_rollout(self) -> Watched:
        """Return the observations with one row for each rollout."""
        rollouts = joined(self.batch)
        if rollouts.batch is self.batch:
            return self
        first = [(self.batch.rollout == n).nonzero()[0, 0] for n in rollouts.batch.rollout]  # type: ignore[union-attr]
        values = {
            f.name: rollouts.join(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor) and value.ndim == 2
        }
        return replace(self, batch=rollouts.batch, number=self.number[torch.stack(first)], **values)


def relearn(trainee: Trainee, recorded: Recorded) -> tuple[Watched, dict[str, float]]:
    """Repeat the optimizer steps of a recorded step; return observations and metrics."""
    state = trainee.state
    state.step = recorded.step
    beta = recorded.metrics.get("objective/beta")
    state.beta = state.beta if beta is None else beta
    learner = trainee.learner_now()
    settings = replace(learner.settings, skip_zero_gradient=False)
    if not trainee.origin.exact:
        # Log-probs of other weights would look like a change of the policy.
        settings = replace(settings, old_logp_from_sampler=False)
    learner = replace(learner, settings=settings)
    seen: list[Seen] = []
    batch, metrics, state.beta = training_step(
        learner, recorded.groups, recorded.step, watch=seen.append
    )
    assert batch is not None, "there are groups"
    watched = Watched.blank(batch, learner.objective)
    for one in seen:
        watched.see(one)
    return watched.by_rollout(), metrics
