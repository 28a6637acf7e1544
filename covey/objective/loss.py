"""The policy loss, and the type `Objective`, which holds the functions that define an algorithm.

    gain   = correction * surrogate(ratio, advantage) - beta * penalty + entropy_bonus * entropy
    loss   = - sum over tokens of weight * gain

This module does not depend on models, configuration, micro-batches or ranks. Advantages are
computed over the batch of a training step. Token weights, corrections and the results of the
objective's `marks` function are computed over an optimizer step. Once advantages, weights,
corrections and the marks (if any) are known, the loss of a micro-batch is a plain sum over the
tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from covey.errors import ConfigError
from covey.objective.correction import mean_one, no_veto
from covey.objective.masked import bounded, difference, joined, row_mean, scored_tokens
from covey.objective.penalty import Penalty, adapted_beta, k3
from covey.objective.ratio import PER_SEQUENCE, Ratio, token
from covey.objective.surrogate import Gain, Tokens
from covey.types import Batch, Totals

Need = Literal[
    "groups", "success", "parts", "tokens", "old_logp", "old_entropy", "reference", "teacher",
    "privileged", "values", "sampler_logp", "sampler_as_old", "entropy", "marks", "turns",
    "states",
]  # fmt: skip
"""The inputs that an objective may read in addition to rewards and `logp`.

Their meanings are:

    groups          at least two rollouts of a prompt, which are compared with each other
    success         which rollouts are a success, instead of their rewards
    parts           the parts of the reward, one by one
    tokens          the tokens themselves
    old_logp        old_logp even if there is one optimizer step per batch
    old_entropy     the sampling policy's entropy, which costs a forward pass
    reference       log-probabilities of a reference policy
    teacher         log-probabilities of a teacher
    privileged      the policy itself as the teacher, with privileged text in its prompts
    values          the values of a critic, which is trained with the policy
    sampler_logp    the log-probabilities that the engine had when it generated
    sampler_as_old  sampler_logp in place of old_logp: ratios are to the sampling policy
    entropy         the current policy's entropy, which every forward pass gives
    marks           log-probabilities of the whole optimizer step, by one more forward pass
    turns           the turns of a rollout in an environment, and their rewards
    states          the environment's states before the turns
"""


class ValueLoss(NamedTuple):
    """The critic's loss on each token, [B, T]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Mask of the tokens whose value loss is clipped, so that its gradient is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm: its component functions, their options, and the inputs that it needs."""

    advantage: Callable[[Batch], torch.Tensor]
    """Function that returns a training step's advantages [B, T], with one row per rollout. With
    `filter.skip_zero_gradient`, the advantage function gets `old_logp` only if the objective's
    `reads` contains "old_logp"."""
    ratio: Ratio = token
    """Function that returns the log-ratio [B, T], given logp - old_logp and the mask; by default,
    each token has its own ratio."""
    surrogate: Callable[[Tokens], Gain]
    weights: Callable[[Batch, Totals], torch.Tensor]
    """Function that returns token weights [B, T], given a batch and the step's `Totals`."""
    correction: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Function that returns correction factors [B, T], given old_logp - sampler_logp and a mask."""
    penalty: Penalty = k3
    beta: float = 0.0

    marks: Callable[[Batch, torch.Tensor], torch.Tensor] | None = None
    """Optional function that returns a mask, ratio bounds or pair margins [B, T] for an optimizer
    step. The function `marks` takes the step's batch with advantages, and the logp [B, T] of the
    batch."""
    targets: Callable[[Batch], torch.Tensor] | None = None
    """Function that returns the critic's targets [B, T], with the same arguments as `advantage`;
    None without a critic."""
    value_loss: Callable[..., ValueLoss] | None = None
    """Function that returns the critic's loss, given new values, old values and targets [B, T];
    None without a critic."""
    kl_in: Literal["loss", "reward", "pair"] = "loss"
    """Whether the KL penalty is a term of the loss or is subtracted from the reward. With `pair`,
    there is no KL penalty, and beta scales the margin between the two completions of a pair."""
    kl_target: float = 0.0
    """Target of the adaptive controller, which changes beta after each step, for the mean KL per
    token (`objective/kl_avg`); 0 means a fixed beta."""
    kl_horizon: float = 10_000.0
    """Horizon of the adaptive KL controller, in rollouts; with a longer horizon, beta changes more
    slowly."""
    entropy_bonus: float = 0.0
    top_entropy: float = 1.0
    """The fraction of tokens that get a policy gradient: the tokens with the highest entropy."""
    off_policy_limit: float = 0.0
    """Limit on how far the mean log-probability of a completion may fall after sampling. A
    completion with a negative advantage is dropped if its mean log-probability falls by more than
    `off_policy_limit`. A limit of 0 keeps all completions.
    """
    veto: float = 0.0
    """A completion is dropped if the trainer's probability of any token is below this number times
    the engine's probability; 0 keeps all completions."""
    correction_mean_one: bool = False
    parts: tuple[str, ...] = ()
    """Names of the reward parts that `advantage` reads, in order. If `parts` is empty, `advantage`
    reads all reward parts in alphabetical order."""
    reads: frozenset[Need] = frozenset({"groups"})
    """The inputs that `advantage` reads. The property `needs` adds the inputs of the objective's
    other functions and options."""

    @property
    def needs(self) -> frozenset[Need]:
        """All inputs that the objective reads, apart from rewards and `logp`."""
        options: dict[Need, bool] = {
            "reference": self.beta != 0.0,
            "old_logp": self.corrects or self.kl_in_reward,
            "old_entropy": self.top_entropy < 1.0,
            "sampler_logp": self.corrects or self.off_policy_limit > 0.0,
            "entropy": self.entropy_bonus != 0.0,
            "marks": self.marks is not None,
        }
        return self.reads | {need for need, needed in options.items() if needed}

    @property
    def kl_in_reward(self) -> bool:
        return self.beta != 0.0 and self.kl_in == "reward"

    @property
    def kl_in_loss(self) -> bool:
        return self.beta != 0.0 and self.kl_in == "loss"

    @property
    def pairs(self) -> bool:
        """Whether the loss is pairwise, as in DPO, with one pair of completions per group."""
        return self.kl_in == "pair"

    @property
    def corrects(self) -> bool:
        """Whether the loss corrects for differences between the log-probs of engine and trainer."""
        return self.correction is not None or self.veto > 0.0

    @property
    def corrects_by_row(self) -> bool:
        """Whether only per-rollout corrections need `old_logp`."""
        others = self.kl_in_reward or self.correction_mean_one or self.marks is not None
        return self.corrects and not others and "old_logp" not in self.reads

    @property
    def per_sequence(self) -> bool:
        """Whether all tokens of a completion have the same ratio."""
        return self.ratio in PER_SEQUENCE

    @property
    def only_surrogate(self) -> bool:
        """Whether a token with advantage 0 has no gradient from any term of the loss."""
        rest = self.kl_in_loss or self.entropy_bonus or self.value_loss is not None
        return not rest and (self.marks is None or self.pairs)


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch, and the per-token tensors [B, T] that the diagnostics read."""

    loss: torch.Tensor
    x: torch.Tensor
    """logp - old_logp."""
    log_ratio: torch.Tensor
    gain: Gain
    penalty: torch.Tensor | None
    """The KL penalty of each token, before the factor beta; None if the loss has no KL penalty."""
    kept: torch.Tensor | None
    """Mask [B, T] of the tokens that `off_policy_limit` keeps; None if no limit is set."""
    correction: torch.Tensor | None
    """The correction factor of each token; None if the objective has no correction."""


def with_advantage(objective: Objective, batch: Batch) -> Batch:
    """Return the batch of a training step with advantages, computed over all rollouts of the batch.

    If the objective has a critic, the returned batch also contains the critic's targets. The mask
    of the returned batch leaves out the rows that do not count (`counted_rows`).
    """
    batch = replace(batch, mask=batch.mask & counted_rows(objective, batch)[:, None])
    rollouts = joined(batch)
    whole = rollouts.batch
    if objective.kl_in_reward:
        assert whole.old_logp is not None, "a KL in the reward needs old_logp"
        assert whole.ref_logp is not None, "a KL in the reward needs a reference"
        d = bounded(difference(whole.old_logp, whole.ref_logp, whole.mask).double())
        penalty = objective.beta * objective.penalty(d, torch.zeros_like(d), whole.mask)
        whole = replace(whole, token_penalty=penalty)
        batch = replace(batch, token_penalty=rollouts.split(penalty))
    if objective.targets is not None:
        batch = replace(batch, targets=rollouts.split(objective.targets(whole)))
    advantage = objective.advantage(whole)
    if not isinstance(advantage, torch.Tensor) or advantage.shape != whole.mask.shape:
        kind = type(advantage).__name__
        found = list(advantage.shape) if isinstance(advantage, torch.Tensor) else kind
        raise ConfigError(
            f"objective: the advantage function returned {found}; it must return a tensor of shape "
            f"{list(whole.mask.shape)}, with one value for each token of each completion"
        )
    if objective.top_entropy < 1.0:
        selected = _uncertain(whole, objective.top_entropy)
        advantage = advantage.where(selected, 0.0)
        batch = replace(batch, selected=rollouts.split(selected))
    return replace(batch, advantage=rollouts.split(advantage))


def counted_rows(objective: Objective, batch: Batch) -> torch.Tensor:
    """Return a mask [B] of the rows that count in the loss and in its denominators.

    A rollout without a reward counts nowhere, unless a teacher gives the advantages.
    """
    scored = ~batch.rewards.isnan()
    return torch.ones_like(scored) if "teacher" in objective.reads else scored


def _uncertain(batch: Batch, share: float) -> torch.Tensor:
    """Return a mask [B, T] of the fraction `share` of tokens with the highest entropy."""
    assert batch.entropy is not None, "a mask by entropy needs old_entropy"
    entropy = batch.entropy.double()
    chosen = entropy[scored_tokens(batch)].sort().values
    if len(chosen) == 0:
        return torch.zeros_like(batch.mask)
    # A quantile with linear interpolation; torch.quantile is limited to 16 million elements.
    place = (1.0 - share) * (len(chosen) - 1)
    below = int(place)
    above = min(below + 1, len(chosen) - 1)
    threshold = chosen[below] + (chosen[above] - chosen[below]) * (place - below)
    return batch.mask & (entropy >= threshold)


def with_weight(objective: Objective, batch: Batch, totals: Totals | None = None) -> Batch:
    """Return an optimizer step's batch with token weights and the objective's corrections.

    Pass `totals` if the optimizer step contains more rows than `batch`. If the batch has no
    old_logp, `policy_loss` computes the corrections later.
    """
    totals = totals or Totals.of(batch, counted_rows(objective, batch))
    batch = replace(batch, weight=objective.weights(batch, totals))
    if not objective.corrects or batch.old_logp is None:
        return batch
    rollouts = joined(batch)
    return replace(batch, correction=rollouts.split(_correction(objective, rollouts.batch)))


def _correction(objective: Objective, batch: Batch) -> torch.Tensor:
    """Return each token's correction factor [B, T]; `batch` must have one row per rollout."""
    assert batch.old_logp is not None, "a correction needs old_logp"
    log_rho = difference(batch.old_logp, batch.sampler_logp, batch.mask)
    factor = torch.ones_like(log_rho)
    if objective.correction is not None:
        factor = objective.correction(log_rho, batch.mask).detach()
    if objective.veto > 0.0:
        factor = factor.where(no_veto(log_rho, veto=objective.veto), 0.0)
    return mean_one(factor, batch.mask) if objective.correction_mean_one else factor


def with_marks(objective: Objective, batch: Batch, logp: torch.Tensor) -> Batch:
    """Return the batch with the result of `objective.marks`, given the step's logp [B, T]."""
    if objective.marks is None:
        return batch
    rollouts = joined(batch)
    marked = objective.marks(rollouts.batch, rollouts.join(logp.detach()))
    return replace(batch, marked=rollouts.split(marked))


def next_beta(objective: Objective, kl: float, *, rollouts: int) -> float:
    """Return the next step's beta, given this step's mean KL and number of rollouts."""
    if not objective.kl_target:
        return objective.beta
    return adapted_beta(
        objective.beta,
        kl,
        target=objective.kl_target,
        horizon=objective.kl_horizon,
        rollouts=rollouts,
    )


def policy_loss(
    objective: Objective, batch: Batch, logp: torch.Tensor, entropy: torch.Tensor | None = None
) -> PolicyLoss:
    """Return the contribution of a batch's rows to the loss of an optimizer step.

    The loss of an optimizer step is the sum of the contributions of all its rows. All rows of a
    rollout must be in the same batch, because a ratio may depend on the whole rollout. `entropy` is
    the current policy's entropy, which only an objective with an entropy bonus needs.
    """
    rollouts = joined(batch)
    batch, mask, split = rollouts.batch, rollouts.batch.mask, rollouts.split
    assert batch.weight is not None, "with_weight comes first"
    logp = rollouts.join(logp).where(mask, 0.0)
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp.where(mask, 0.0)
    tokens, gain = _gain(objective, batch, logp, old_logp)
    value, correction, penalty = gain.value, batch.correction, None
    if batch.selected is not None:  # a surrogate may have a gradient without an advantage (KL-Cov)
        value = value.where(batch.selected, 0.0)
    if objective.corrects and batch.old_logp is None:
        correction = _correction(objective, replace(batch, old_logp=old_logp))
    if correction is not None:
        value = value * correction
    kept = None
    if objective.off_policy_limit:  # DeepSeek-V3.2, equation 9
        fallen = row_mean(difference(batch.sampler_logp, logp.detach(), mask), mask)
        kept = ~((tokens.advantage < 0) & (fallen > objective.off_policy_limit))
        value = value.where(kept, 0.0)
    if objective.kl_in_loss:
        assert batch.ref_logp is not None, "a penalty needs a reference"
        d = bounded(difference(logp, batch.ref_logp, mask))
        penalty = objective.penalty(d, bounded(logp - old_logp), mask)
        value = value - objective.beta * penalty
        penalty = penalty.detach()
    if objective.entropy_bonus:
        assert entropy is not None, "an entropy bonus needs the entropy"
        value = value + objective.entropy_bonus * rollouts.join(entropy).where(mask, 0.0)
    return PolicyLoss(
        loss=-(value * batch.weight.to(logp.dtype)).where(mask, 0.0).sum(),
        x=split((logp - old_logp).detach()),
        log_ratio=split(tokens.log_ratio.detach()),
        gain=Gain._make(map(split, gain._replace(value=gain.value.detach()))),
        penalty=split(penalty),
        kept=split(kept),
        correction=split(correction),
    )


def _gain(
    objective: Objective, batch: Batch, logp: torch.Tensor, old_logp: torch.Tensor
) -> tuple[Tokens, Gain]:
    """Return the inputs and the outputs of the objective's surrogate."""
    assert batch.advantage is not None, "with_advantage comes first"
    tokens = Tokens(
        log_ratio=objective.ratio(logp - old_logp, batch.mask),
        logp=logp,
        old_logp=old_logp,
        advantage=batch.advantage.to(logp.dtype),
        mask=batch.mask,
        marked=batch.marked,
        ref_logp=batch.ref_logp,
        beta=objective.beta,
    )
    gain = objective.surrogate(tokens)
    if not isinstance(gain, Gain):
        function = objective.surrogate
        raise ConfigError(
            "objective: the surrogate "
            f"{getattr(function, '__name__', type(function).__name__)} returned "
            f"{type(gain).__name__}; it must return covey.objective.surrogate.Gain"
        )
    return tokens, gain


class CriticLoss(NamedTuple):
    """The critic's loss on a micro-batch, and the critic's loss on each token [B, T]."""

    loss: torch.Tensor
    tokens: ValueLoss


def value_loss(
    objective: Objective, batch: Batch, values: torch.Tensor, totals: Totals | None = None
) -> CriticLoss:
    """Return the contribution of a batch's rows to the critic's loss on an optimizer step.

    The critic's loss is a mean over all tokens of the optimizer step, so pass `totals` if the
    optimizer step contains more rows than `batch`.
    """
    assert objective.value_loss is not None, "the objective has no critic"
    assert batch.values is not None, "the critic's values come before the optimizer steps"
    assert batch.targets is not None, "with_advantage comes first"
    mask, dtype = batch.mask, values.dtype
    old, targets = batch.values.to(dtype).where(mask, 0.0), batch.targets.to(dtype)
    tokens = objective.value_loss(values.where(mask, 0.0), old, targets)
    count = max(1, (totals or Totals.of(batch)).tokens)
    return CriticLoss(tokens.loss.where(mask, 0.0).sum() / count, tokens)
