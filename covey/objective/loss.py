"""An objective is seven pieces; the policy loss is what they add up to.

    gain   = correction * surrogate(ratio, advantage) - beta * penalty + entropy_bonus * entropy
    loss   = - sum over tokens of weight * gain

Nothing here knows about models, configuration, micro-batches or ranks. Advantages are filled in
over a rollout batch, weights, corrections and marks over an optimizer step, and the loss of a
micro-batch is then a plain sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from covey.objective.correction import mean_one, no_veto
from covey.objective.masked import bounded, difference, row_mean
from covey.objective.penalty import Penalty, adapted_beta, k3
from covey.objective.ratio import PER_ANSWER, Ratio
from covey.objective.surrogate import Gain, Tokens
from covey.types import Batch, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm as a value: seven pieces, what goes with them, and what they need."""

    advantage: Callable[[Batch], torch.Tensor]
    """[B, T] from a whole rollout batch, which it may take statistics of; before old_logp is there,
    if answers without advantage are to be left out."""
    ratio: Ratio
    """Log-ratio [B, T] from logp - old_logp and mask."""
    surrogate: Callable[[Tokens], Gain]
    weights: Callable[[torch.Tensor, torch.Tensor, Totals], torch.Tensor]
    """[B, T] from mask, group and the totals of one optimizer step."""
    correction: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Constant factor [B, T] from old_logp - sampler_logp and mask. None: 1."""
    penalty: Penalty = k3
    beta: float = 0.0

    marks: Callable[[Batch, torch.Tensor], torch.Tensor] | None = None
    """Tokens [B, T] bool to treat apart, from a batch with advantages and the logp of one optimizer
    step, which then costs a forward pass more. None: none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where beta times the penalty is subtracted: from each token's gain, or from the reward."""
    kl_target: float = 0.0
    """The KL that beta is adapted to keep, step by step. 0: beta is fixed."""
    kl_horizon: float = 10_000.0
    """Answers over which an adaptive beta would fully correct a KL that is off."""
    entropy_bonus: float = 0.0
    top_entropy: float = 1.0
    """Share of tokens, the most uncertain ones, whose surrogate counts."""
    off_policy_limit: float = 0.0
    """Drop a bad answer that has become less likely, since it was sampled, by more than this in
    mean log-probability. 0: keep all."""
    veto: float = 0.0
    """Drop an answer if the trainer finds one of its tokens less likely than this times what the
    sampler said. 0: keep all."""
    correction_mean_one: bool = False

    compares: bool = True
    """Whether answers are compared within their group, which then needs at least two."""
    needs_entropy: bool = False
    """Whether `advantage` reads the sampling policy's entropy, which costs a forward pass."""
    needs_tokens: bool = False
    """Whether `advantage` reads the tokens themselves."""
    needs_success: bool = False
    """Whether `advantage` reads which answers are right, rather than how much reward they got."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must exist at all."""
        return self.beta != 0.0

    @property
    def needs_old_entropy(self) -> bool:
        """Whether the entropy of the sampling policy must be known before the update."""
        return self.needs_entropy or self.top_entropy < 1.0

    @property
    def needs_old_logp(self) -> bool:
        """Whether old_logp must be known even if there is one optimizer step to a batch."""
        return self.corrects or (self.needs_reference and self.kl_in == "reward")

    @property
    def reads_old_policy(self) -> bool:
        """Whether advantages or weights, and not ratios alone, depend on what it said."""
        return self.needs_old_logp or self.needs_old_entropy

    @property
    def corrects(self) -> bool:
        """Whether the sampler's numerics are corrected for."""
        return self.correction is not None or self.veto > 0.0

    @property
    def per_answer(self) -> bool:
        """Whether all tokens of an answer share one ratio."""
        return self.ratio in PER_ANSWER

    @property
    def only_surrogate(self) -> bool:
        """Whether a token without advantage has no gradient at all."""
        penalized = self.needs_reference and self.kl_in == "loss"
        return not penalized and not self.entropy_bonus and self.marks is None


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch and the per-token tensors [B, T] that diagnostics are made of."""

    loss: torch.Tensor
    x: torch.Tensor
    """logp - old_logp."""
    log_ratio: torch.Tensor
    gain: Gain
    penalty: torch.Tensor | None
    """The KL estimate that is in the loss. None: it has none."""
    kept: torch.Tensor | None
    """bool [B, T]: not dropped for having become too unlikely. None: nothing is."""


def with_advantage(objective: Objective, batch: Batch) -> Batch:
    """Fill in the advantages of a whole rollout batch."""
    if objective.needs_reference and objective.kl_in == "reward":
        assert batch.old_logp is not None, "a KL in the reward needs old_logp"
        assert batch.ref_logp is not None, "a KL in the reward needs a reference"
        d = bounded(difference(batch.old_logp, batch.ref_logp, batch.mask).double())
        penalty = objective.penalty(d, torch.zeros_like(d), batch.mask)
        batch = replace(batch, token_penalty=objective.beta * penalty)
    advantage = objective.advantage(batch)
    if objective.top_entropy < 1.0:
        advantage = advantage.where(_uncertain(batch, objective.top_entropy), 0.0)
    return replace(batch, advantage=advantage)


def _uncertain(batch: Batch, share: float) -> torch.Tensor:
    """Mark the tokens [B, T] whose entropy is among the largest `share` of the batch."""
    assert batch.entropy is not None, "a mask by entropy needs it"
    entropy = batch.entropy.double()
    chosen = entropy[batch.mask & ~batch.rewards.isnan()[:, None]].sort().values
    if len(chosen) == 0:
        return torch.zeros_like(batch.mask)
    # The quantile with linear interpolation; torch's own stops at 16 million tokens.
    place = (1.0 - share) * (len(chosen) - 1)
    below = int(place)
    above = min(below + 1, len(chosen) - 1)
    threshold = chosen[below] + (chosen[above] - chosen[below]) * (place - below)
    return batch.mask & (entropy >= threshold)


def with_weight(objective: Objective, batch: Batch, totals: Totals | None = None) -> Batch:
    """Fill in weights, and corrections if there are any, of one optimizer step.

    Give `totals` when the step spans more than `batch`.
    """
    totals = totals or Totals.of(batch)
    batch = replace(batch, weight=objective.weights(batch.mask, batch.group, totals))
    if not objective.corrects:
        return batch
    assert batch.old_logp is not None, "a correction needs old_logp"
    log_rho = difference(batch.old_logp, batch.sampler_logp, batch.mask)
    factor = torch.ones_like(log_rho)
    if objective.correction is not None:
        factor = objective.correction(log_rho, batch.mask).detach()
    if objective.veto > 0.0:
        factor = factor.where(no_veto(log_rho, veto=objective.veto), 0.0)
    if objective.correction_mean_one:
        factor = mean_one(factor, batch.mask)
    return replace(batch, correction=factor)


def with_marks(objective: Objective, batch: Batch, logp: torch.Tensor) -> Batch:
    """Fill in the marked tokens of one optimizer step from its logp [B, T]."""
    if objective.marks is None:
        return batch
    return replace(batch, marked=objective.marks(batch, logp.detach()))


def next_beta(objective: Objective, kl: float, *, answers: int) -> float:
    """Return the beta of the next step, given the mean KL of this one over so many answers."""
    if not objective.kl_target:
        return objective.beta
    return adapted_beta(
        objective.beta,
        kl,
        target=objective.kl_target,
        horizon=objective.kl_horizon,
        answers=answers,
    )


def policy_loss(
    objective: Objective, batch: Batch, logp: torch.Tensor, entropy: torch.Tensor | None = None
) -> PolicyLoss:
    """Return the part of the step's loss that these rows contribute. Parts simply add up.

    `entropy` is that of the policy now, for an objective with an entropy bonus.
    """
    assert batch.advantage is not None, "with_advantage comes first"
    assert batch.weight is not None, "with_weight comes first"
    mask = batch.mask
    logp = logp.where(mask, 0.0)
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.where(mask, 0.0)
    tokens = Tokens(
        log_ratio=objective.ratio(logp - old_logp, mask),
        logp=logp,
        old_logp=old_logp,
        advantage=batch.advantage.to(logp.dtype),
        mask=mask,
        marked=batch.marked,
    )
    gain = objective.surrogate(tokens)
    value = gain.value if batch.correction is None else gain.value * batch.correction
    kept = _kept(objective, batch, tokens)
    if kept is not None:
        value = value.where(kept, 0.0)
    penalty = None
    if objective.needs_reference and objective.kl_in == "loss":
        assert batch.ref_logp is not None, "a penalty needs a reference"
        d = bounded(difference(logp, batch.ref_logp, mask))
        penalty = objective.penalty(d, bounded(logp - old_logp), mask)
        value = value - objective.beta * penalty
    if objective.entropy_bonus:
        assert entropy is not None, "an entropy bonus needs the entropy"
        value = value + objective.entropy_bonus * entropy.where(mask, 0.0)
    loss = -(value * batch.weight.to(logp.dtype)).where(mask, 0.0).sum()
    return PolicyLoss(
        loss=loss,
        x=(logp - old_logp).detach(),
        log_ratio=tokens.log_ratio.detach(),
        gain=gain._replace(value=gain.value.detach()),
        penalty=None if penalty is None else penalty.detach(),
        kept=kept,
    )


def _kept(objective: Objective, batch: Batch, tokens: Tokens) -> torch.Tensor | None:
    """Mark what is not both bad and too unlikely by now. DeepSeek-V3.2, equation 9."""
    if not objective.off_policy_limit:
        return None
    fallen = row_mean(difference(batch.sampler_logp, tokens.logp.detach(), batch.mask), batch.mask)
    return ~((tokens.advantage < 0) & (fallen > objective.off_policy_limit))
