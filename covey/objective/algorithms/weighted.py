"""Algorithms that weigh log-probabilities, or gate them softly, instead of clipping a ratio."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import advantage, ratio, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.penalty import PENALTIES, Kl


def cispo(
    *,
    max_weight: float = 5.0,
    min_weight: float = 0.0,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Clipped IS-weight Policy Optimization, arXiv 2506.13585.

        loss = - 1/T sum_i sum_t sg(clip(r, min_weight, max_weight)) A logp

    No token loses its gradient; only its weight is bounded. Both bounds are absolute: codes
    disagree on whether the cap is 1 + eps_high (paper, verl) or eps_high itself (TRL), so that
    one number means two things. The paper publishes no cap; 5 is ScaleRL's. It has no lower bound.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.truncated_weight, max_weight=max_weight, min_weight=min_weight),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def sapo(
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Soft Adaptive Policy Optimization, arXiv 2511.20347.

        loss = - 1/N sum_i 1/T_i sum_t f(r) A,  f(r) = 4/tau sigmoid(tau (r - 1))
        tau  = tau_pos if A > 0 else tau_neg

    The slope of f is 1 at r = 1 and falls off on both sides instead of being cut, faster for bad
    tokens.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.soft_gate, tau_pos=tau_pos, tau_neg=tau_neg),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def gpg(
    *,
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] = "token_mean",
    beta: float = 0.0,
    kl: Kl = "k3",
) -> Objective:
    """Group Policy Gradient, arXiv 2504.02546.

        A_i  = alpha (R_i - mean_g R),  alpha = N / completions in groups with variance
        loss = - 1/T sum_i sum_t A logp

    Neither ratio nor clip: with several optimizer steps per batch nothing holds the policy back.
    alpha makes up for groups that teach nothing; it is 0 / 0 in no case. verl counts non-zero
    rewards instead, which is something else.
    """
    return Objective(
        advantage=advantage.scaled_up,
        ratio=ratio.token,
        surrogate=surrogate.log_likelihood,
        weights=weights.WEIGHTS[aggregation],
        penalty=PENALTIES[kl],
        beta=beta,
    )


def vespo(
    *,
    power_pos: float = 2.0,
    rate_pos: float = 3.0,
    power_neg: float = 3.0,
    rate_neg: float = 2.0,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Variational sequence-level soft policy optimization, arXiv 2602.10693.

        q_i  = exp( sum_t (logp - old_logp) )
        loss = - 1/T sum_i sum_t sg(phi(q)) A logp,  phi(w) = w^power exp(rate (1 - w))

    with (power, rate) = (2, 3) for A >= 0 and (3, 2) otherwise. phi is 1 on policy and vanishes on
    both sides. Choice: a correction for the sampler is a factor of its own and not part of q.
    """
    gate = partial(
        surrogate.gamma_weight,
        power_pos=power_pos, rate_pos=rate_pos, power_neg=power_neg, rate_neg=rate_neg,
    )  # fmt: skip
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.product,
        surrogate=gate,
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def dppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_weight: float = 20.0,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Divergence PPO with total variation, arXiv 2602.04879.

        loss = - 1/T sum_i sum_t keep sg(min(r, max_weight)) A logp
        keep = p - p_old <= clip_high if A > 0 else p - p_old >= -clip_low,  p = exp(logp)

    The bounds are of probabilities, not of ratios: a rare token may double, a common one may not
    lose much.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(
            surrogate.trust_mask, clip_low=clip_low, clip_high=clip_high, max_weight=max_weight
        ),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )
