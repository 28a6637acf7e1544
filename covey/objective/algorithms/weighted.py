"""Algorithms without the PPO clip, for example with importance weights or soft gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, ratio, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(title="Clipped IS-weight Policy Optimization", source="arXiv 2506.13585")
def cispo(
    *, max_weight: float = 5.0, min_weight: float = 0.0, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        loss = - 1/T sum_i sum_t sg(clip(r, min_weight, max_weight)) A logp

    Every token keeps its gradient, but its importance weight is bounded. The bounds `min_weight`
    and `max_weight` are values of the ratio, not distances from 1. The paper and verl write the
    upper bound as 1 + eps_high, and TRL writes it as eps_high. The paper gives no value for the
    upper bound, so the default `max_weight` of 5 is taken from ScaleRL. In the paper, the
    importance weight has no lower bound.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.truncated_weight, max_weight=max_weight, min_weight=min_weight),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Soft Adaptive Policy Optimization", source="arXiv 2511.20347")
def sapo(
    *, tau_pos: float = 1.0, tau_neg: float = 1.05, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        loss = - 1/N sum_i 1/T_i sum_t f(r) A,  f(r) = 4/tau sigmoid(tau (r - 1))
        tau  = tau_pos if A > 0 else tau_neg

    The slope of the gate f is 1 at a ratio of 1 and falls smoothly on both sides. For tokens with a
    negative advantage, the slope of the gate falls faster.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.soft_gate, tau_pos=tau_pos, tau_neg=tau_neg),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Group Policy Gradient", source="arXiv 2504.02546")
def gpg(
    *, aggregation: Literal["token_mean", "sequence_mean_token_mean"] = "token_mean",
    beta: float = 0.0, kl: Kl = "k3",
) -> Objective:  # fmt: skip
    """
        A_i  = alpha (R_i - mean_g R),  alpha = N / completions in groups with variance
        loss = - 1/T sum_i sum_t A logp

    `gpg` has no ratio and no clip, so with several optimizer steps per batch, nothing limits the
    change of the policy. Groups with equal rewards have no gradient, and the factor alpha scales up
    the advantages of all other groups to compensate. If every group has equal rewards, all
    advantages are 0. To compute alpha, verl counts completions with non-zero rewards, which gives a
    different factor.
    """
    return Objective(
        advantage=advantage.scaled_up,
        surrogate=surrogate.log_likelihood,
        weights=weights.WEIGHTS[aggregation],
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Variational sequence-level soft policy optimization", source="arXiv 2602.10693")
def vespo(
    *, power_pos: float = 2.0, rate_pos: float = 3.0, power_neg: float = 3.0,
    rate_neg: float = 2.0, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        q_i  = exp( sum_t (logp - old_logp) )
        loss = - 1/T sum_i sum_t sg(phi(q)) A logp,  phi(w) = w^power exp(rate (1 - w))

    By default, (power, rate) is (2, 3) for an advantage A >= 0, and (3, 2) for A < 0. The weight
    phi of a completion is 1 on policy, and approaches 0 if the completion's ratio q is very small
    or very large. In Covey, the correction for differences between engine and trainer is a separate
    factor, not part of the ratio q.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.product,
        surrogate=partial(
            surrogate.gamma_weight,
            power_pos=power_pos,
            rate_pos=rate_pos,
            power_neg=power_neg,
            rate_neg=rate_neg,
        ),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Divergence PPO with total variation", source="arXiv 2602.04879")
def dppo(
    *, anchor: Literal["sampler_logp", "old_logp"] = "sampler_logp", clip_low: float = 0.15,
    clip_high: float = 0.15, max_weight: float = 20.0, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        loss = - 1/T sum_i sum_t keep sg(min(r, max_weight)) A logp
        keep = p - p_0 <= clip_high if A > 0 else p - p_0 >= -clip_low,  p = exp(logp)
        r    = p / p_0,  p_0 = exp(sampler_logp)

    The clip bounds of `dppo` limit the change of a token's probability, not the ratio of
    probabilities. With `dppo`, the probability of a rare token may double, but the ratio of a
    common token must stay near 1.

    The default is the authors' main variant, `dppo_binary_tv` in their code. In this variant, the
    change is measured from the policy that sampled, with the engine's log-probs, so `dppo` needs no
    other correction for stale rollouts or for an engine that differs from the trainer. The default
    bounds of 0.15 are from the authors' training script. With `anchor = "old_logp"`, p_0 is
    exp(old_logp), from the trainer at the start of the training step. The authors call a mask from
    the trainer's log-probs `dppo_binary_tv_recompute`, and find it less stable.

    Departures: the authors' script combines the loss with the advantages of Dr.GRPO and divides by
    a constant length. Covey's `dppo` has the advantages of GRPO and takes the mean over tokens. For
    the script's loss, set `objective.name = "composed"` with `advantage = "centered"`, `surrogate =
    "trust_mask"` and `weights = "sequence_mean_token_sum_norm"`, and set `train.old_logp =
    "sampler"`. The authors' variants with a KL divergence or with the likeliest tokens are not
    included. With `anchor = "old_logp"`, both the mask and the weight r use old_logp, so stale
    rollouts need `objective.correction`, which is set by default.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(
            surrogate.trust_mask, clip_low=clip_low, clip_high=clip_high, max_weight=max_weight
        ),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=frozenset({"groups", "sampler_as_old"} if anchor == "sampler_logp" else {"groups"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "vespo": vespo,
    "dppo": dppo,
}
