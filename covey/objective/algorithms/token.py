"""Algorithms that treat tokens apart: by entropy, by a weight of their own, by what they share."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import advantage, marks, ratio, shaping, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.penalty import PENALTIES, Kl


def gtpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    scope: shaping.Scope = "group",
    norm: Literal["batch", "polarity"] = "batch",
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 0,
    eps: float = 1e-6,
    entropy_floor: float = 1e-3,
) -> Objective:
    """Group Token Policy Optimization, arXiv 2508.04349 (v5): rewards shaped by token entropy H.

        rp[i,t] =  alpha1 + alpha2 d_t H[i,t] / sum_{k in O+} H[k,t]        right answers, O+
        rn[j,t] = -alpha1 - alpha2 h_t (1/H[j,t]) / sum_{k in O-} 1/H[k,t]  wrong answers, O-
        A       = (rp - mean rp) / (std rp + eps), and the same for rn
        loss    = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    d_t and h_t count the right and wrong answers that reach position t. Not to be confused with
    `gtpo_trajectory`, which has the same initials.

    Choices: mean and deviation are over all tokens of the batch, rp being 0 on tokens of wrong
    answers and rn on those of right ones. The paper can also be read as "over tokens of the same
    polarity" (`norm = "polarity"`), but then alpha1 and alpha2 cancel and half of every right
    answer is pushed down. The sums over k are of the group, as in the equations; the paper's runs
    took the batch (`scope`). 1/H is taken of H no smaller than entropy_floor. Right is what the
    reward calls a success.

    Departure: a group that is all right or all wrong has advantage 0, as dynamic sampling, which
    the paper's runs use, would have it.
    """
    shaped = partial(
        shaping.entropy_shaped_tokens,
        alpha1=alpha1, alpha2=alpha2, scope=scope, norm=norm,
        ddof=ddof, eps=eps, entropy_floor=entropy_floor,
    )  # fmt: skip
    return Objective(
        advantage=shaped,
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        reads=shaping.SHAPED_BY_ENTROPY,
    )


def gtpo_trajectory(
    *,
    bonus: float = 2.0,
    max_entropy: float = 0.7,
    entropy_cost: float = 0.1,
    beta: float = 0.0,
    kl: Kl = "k3",
) -> Objective:
    """Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772: the other GTPO.

        A_i  = R_i - mean_g R - entropy_cost H_i;  0 if H_i > max_entropy
        loss = - 1/N sum_i 1/T_i sum_t exp(logp - sg(logp)) A_i delta[i,t] / max(1, conflicts_i)

    H_i is the mean entropy of the answer. A conflict token stands at the same place in a good and
    in a bad answer of the group, in an unbroken run from the start or from the end. On it delta is
    `bonus` in a good answer, 0 in a bad one, for each of the two runs; elsewhere 1. So the form
    that all answers share is not pushed down with the bad ones. No ratio, no clip, no reference.

    Departures: H_i is taken when the batch is collected rather than anew in every optimizer step,
    so that the advantage is a constant of the batch. A group without variance has advantage 0; the
    authors' code would push it down by its entropy.
    """
    return Objective(
        advantage=partial(
            shaping.without_conflicts,
            bonus=bonus,
            max_entropy=max_entropy,
            entropy_cost=entropy_cost,
        ),
        ratio=ratio.one,
        surrogate=surrogate.unclipped,
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        reads=shaping.WITHOUT_CONFLICTS,
    )


def clip_cov(
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Clip-Cov, arXiv 2505.22617: no gradient for a few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A), but 0 for
               max(1, share T) random tokens with cov_low < cov < cov_high that are not clipped

    Choices: cov is over the whole optimizer step, not over a micro-batch, so it takes a forward
    pass more. The random tokens are picked by a hash of what was sampled: the same whatever the
    order of rows and the micro-batches.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped_without_marked, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        marks=partial(
            marks.random_within_bounds,
            share=share, cov_low=cov_low, cov_high=cov_high, clip_low=clip_low, clip_high=clip_high,
        ),
    )  # fmt: skip


def kl_cov(
    *,
    share: float = 2e-4,
    coefficient: float = 1.0,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """KL-Cov, arXiv 2505.22617: hold on to a few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    Elsewhere the ratio is not clipped at all. Choices: cov is over the whole optimizer step, not
    over a micro-batch, so it takes a forward pass more; only tokens with cov above 0 are picked.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.penalized_where_marked, coefficient=coefficient),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        marks=partial(marks.largest, share=share),
    )
