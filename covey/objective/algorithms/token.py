"""Algorithms that treat tokens apart: by entropy, by a weight of their own, by what they share."""

from __future__ import annotations

from functools import partial

from covey.objective import advantage, marks, ratio, shaping, surrogate, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective


@takes(
    "clip_low",
    "clip_high",
    "alpha1",
    "alpha2",
    "scope",
    "norm",
    "beta",
    "kl",
    "ddof",
    "eps",
    "entropy_floor",
)
def gtpo() -> Objective:
    """Group Token Policy Optimization, arXiv 2508.04349 (v5): rewards shaped by token entropy H.

        rp[i,t] =  alpha1 + alpha2 d_t H[i,t] / sum_{k in O+} H[k,t]        correct completions, O+
        rn[j,t] = -alpha1 - alpha2 h_t (1/H[j,t]) / sum_{k in O-} 1/H[k,t]  wrong completions, O-
        A       = (rp - mean rp) / (std rp + eps), and the same for rn
        loss    = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    d_t and h_t count the correct and wrong completions that reach position t. Not to be confused
    with `gtpo_trajectory`, which has the same initials.

    Choices: mean and deviation are over all tokens of the batch, rp being 0 on tokens of wrong
    completions and rn on those of correct ones. The paper can also be read as "over tokens of the
    same polarity" (`norm = "polarity"`), but then alpha1 and alpha2 cancel and half of every
    correct completion is pushed down. The sums over k are of the group, as in the equations; the
    paper's runs took the batch (`scope`). 1/H is taken of H no smaller than entropy_floor. A
    completion is correct if the reward calls it a success.

    Departure: a group that is all correct or all wrong has advantage 0, as dynamic sampling, which
    the paper's runs use, would have it.
    """
    return Objective(
        advantage=shaping.entropy_shaped_tokens,
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_high=0.28),
        weights=weights.token_mean,
        reads=shaping.SHAPED_BY_ENTROPY,
    )


@takes("bonus", "max_entropy", "entropy_cost", "beta", "kl")
def gtpo_trajectory() -> Objective:
    """Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772: the other GTPO.

        A_i  = R_i - mean_g R - entropy_cost H_i;  0 if H_i > max_entropy
        loss = - 1/N sum_i 1/T_i sum_t exp(logp - sg(logp)) A_i delta[i,t] / max(1, conflicts_i)

    H_i is the mean entropy of the completion. A conflict token stands at the same place in a good
    and in a bad completion of the group, in an unbroken run from the start or from the end. On it
    delta is `bonus` in a good completion, 0 in a bad one, for each of the two runs; elsewhere 1. So
    the form that all completions share is not pushed down with the bad ones. No ratio, no clip, no
    reference.

    Departures: H_i is taken when the batch is collected rather than anew in every optimizer step,
    so that the advantage is a constant of the batch. A group without variance has advantage 0; the
    authors' code would push it down by its entropy.
    """
    return Objective(
        advantage=shaping.without_conflicts,
        ratio=ratio.one,
        surrogate=surrogate.unclipped,
        weights=weights.sequence_mean_token_mean,
        reads=shaping.WITHOUT_CONFLICTS,
    )


@takes("clip_low", "clip_high", "share", "cov_low", "cov_high", "beta", "kl", "ddof", "eps")
def clip_cov() -> Objective:
    """Clip-Cov, arXiv 2505.22617: no gradient for a few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A), but 0 for
               max(1, share T) random tokens with cov_low < cov < cov_high that are not clipped

    Choices: cov is over the whole optimizer step, not over a micro-batch, so it takes a forward
    pass more. The random tokens are picked by a hash of what was sampled: the same whatever the
    order of rows and the micro-batches.
    """
    return Objective(
        advantage=advantage.group_standardized,
        ratio=ratio.token,
        surrogate=surrogate.clipped_without_marked,
        weights=weights.token_mean,
        marks=marks.random_within_bounds,
    )


@takes("share", "coefficient", "beta", "kl", "ddof", "eps")
def kl_cov() -> Objective:
    """KL-Cov, arXiv 2505.22617: hold on to a few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    Elsewhere the ratio is not clipped at all. Choices: cov is over the whole optimizer step, not
    over a micro-batch, so it takes a forward pass more; only tokens with cov above 0 are picked.
    """
    return Objective(
        advantage=advantage.group_standardized,
        ratio=ratio.token,
        surrogate=surrogate.penalized_where_marked,
        weights=weights.token_mean,
        marks=marks.largest,
    )
