"""An objective is seven pieces; the policy loss is what they add up to.

    gain   = correction * surrogate(ratio, advantage) - beta * penalty
    loss   = - sum over tokens of weight * gain

Nothing here knows about models, configuration, micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from covey.objective.surrogate import Gain
from covey.types import Batch, Totals


class Surrogate(Protocol):
    """Gain per token from ratio and advantage. Some need `logp` itself rather than the ratio."""

    def __call__(
        self,
        *,
        log_ratio: torch.Tensor,
        logp: torch.Tensor,
        advantage: torch.Tensor,
        mask: torch.Tensor,
    ) -> Gain:
        """Return the gain of every token."""


class Penalty(Protocol):
    """Estimate per token of the divergence from the reference."""

    def __call__(
        self, *, logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the estimate of every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm as a value: seven pieces, and what they need to be given."""

    advantage: Callable[[Batch], torch.Tensor]
    """[B, T] from a whole rollout batch, which it may take statistics of."""
    ratio: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Log-ratio [B, T] from logp, old_logp and mask."""
    surrogate: Surrogate
    weights: Callable[[torch.Tensor, torch.Tensor, Totals], torch.Tensor]
    """[B, T] from mask, group and the totals of one optimizer step."""
    correction: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Constant factor [B, T] from old_logp, sampler_logp and mask."""
    penalty: Penalty
    beta: float
    needs_entropy: bool = False
    """Whether `advantage` reads the sampling policy's entropy, which costs a forward pass."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must exist at all."""
        return self.beta != 0.0


class LossOutput(NamedTuple):
    """The loss of a micro-batch and the per-token tensors [B, T] that diagnostics are made of."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    penalty: torch.Tensor | None
    correction: torch.Tensor


def with_advantage(objective: Objective, batch: Batch) -> Batch:
    """Fill in the advantages of a whole rollout batch."""
    return replace(batch, advantage=objective.advantage(batch))


def with_weight(objective: Objective, batch: Batch, totals: Totals | None = None) -> Batch:
    """Fill in the weights of one optimizer step; give `totals` when it spans more than `batch`."""
    totals = totals or Totals.of(batch)
    return replace(batch, weight=objective.weights(batch.mask, batch.group, totals))


def policy_loss(objective: Objective, batch: Batch, logp: torch.Tensor) -> LossOutput:
    """Return the part of the step's loss that these rows contribute. Parts simply add up."""
    assert batch.advantage is not None, "with_advantage comes first"
    assert batch.weight is not None, "with_weight comes first"
    mask = batch.mask
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
    advantage = batch.advantage.to(logp.dtype)

    log_ratio = objective.ratio(logp, old_logp, mask)
    gain = objective.surrogate(log_ratio=log_ratio, logp=logp, advantage=advantage, mask=mask)
    correction = objective.correction(old_logp, batch.sampler_logp, mask)
    value = gain.value * correction

    penalty = None
    if objective.needs_reference:
        assert batch.ref_logp is not None, "a penalty needs a reference"
        penalty = objective.penalty(logp=logp, ref_logp=batch.ref_logp, mask=mask)
        value = value - objective.beta * penalty

    loss = -(value * batch.weight.to(logp.dtype)).where(mask, 0.0).sum()
    return LossOutput(
        loss=loss,
        log_ratio=log_ratio.detach(),
        clipped_low=gain.clipped_low,
        clipped_high=gain.clipped_high,
        penalty=None if penalty is None else penalty.detach(),
        correction=correction,
    )
