"""Algorithms that treat tokens differently: by entropy, covariance or conflicts in the group."""

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

    d_t and h_t count the correct and wrong completions that reach position t. Do not confuse this
    algorithm with `gtpo_trajectory`, which has the same initials.

    Choices: mean and std are over all tokens of the batch; rp is 0 for tokens of wrong
    completions, and rn is 0 for tokens of correct ones. The paper can also be read as "over tokens
    of the same polarity" (`norm = "polarity"`), but then alpha1 and alpha2 cancel and about half
    the tokens of correct completions get a negative advantage. The sums over k are over the group,
    as in the equations; the paper's runs took them over the batch (`scope`). In 1/H, H is at least
    entropy_floor. A completion is correct if the reward calls it a success.

    Departure: a group that is all correct or all wrong has advantage 0. The paper's runs drop such
    groups by dynamic sampling.
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

    H_i is the mean entropy of the completion. A conflict token occurs at the same position in a
    good and in a bad completion of the group, within a common prefix or, counted from the end, a
    common suffix. For a conflict token, delta is `bonus` in a good completion and 0 in a bad one,
    once for the prefix and once for the suffix; for other tokens it is 1. So bad completions do not
    lower the probability of the format that all completions share. There is no ratio, no clip and
    no reference.

    Departures: H_i is computed once, when the batch is collected, and not in every optimizer step,
    so that the advantage is a constant of the batch. A group with equal rewards has advantage 0; in
    the authors' code its advantage is -entropy_cost H_i.
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
    """Clip-Cov, arXiv 2505.22617: no gradient for the few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A), but 0 for
               max(1, share T) random tokens with cov_low < cov < cov_high that are not clipped

    Choices: cov is computed over the whole optimizer step, not per micro-batch. This takes one
    more forward pass. The random tokens are picked by a hash of the sampler's log-probabilities, so
    the choice does not depend on the order of rows or on the micro-batches.
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
    """KL-Cov, arXiv 2505.22617: a penalty on the few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    Ratios are not clipped. Choices: cov is computed over the whole optimizer step, not per
    micro-batch. This takes one more forward pass. Only tokens with a positive cov are selected.
    """
    return Objective(
        advantage=advantage.group_standardized,
        ratio=ratio.token,
        surrogate=surrogate.penalized_where_marked,
        weights=weights.token_mean,
        marks=marks.largest,
    )
