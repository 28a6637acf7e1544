"""Algorithms that weight tokens by entropy, covariance or conflicts between completions."""

from __future__ import annotations

from functools import partial

from covey.objective import advantage, marks, ratio, shaping, surrogate, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective


@takes(
    "clip_low", "clip_high", "alpha1", "alpha2", "scope", "norm", "beta", "kl", "ddof", "eps",
    "entropy_floor",
)  # fmt: skip
def gtpo() -> Objective:
    """Group Token Policy Optimization, arXiv 2508.04349 (v5): rewards shaped by token entropy H.

        rp[i,t] =  alpha1 + alpha2 d_t H[i,t] / sum_{k in O+} H[k,t]        correct completions, O+
        rn[j,t] = -alpha1 - alpha2 h_t (1/H[j,t]) / sum_{k in O-} 1/H[k,t]  wrong completions, O-
        A       = (rp - mean rp) / (std rp + eps), and the same for rn
        loss    = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    d_t is the number of correct completions that reach position t, and h_t is the number of wrong
    completions that reach position t. Do not confuse `gtpo` with `gtpo_trajectory`, an algorithm
    with the same initials.

    Choices: the shaped rewards rp and rn have separate means and standard deviations, each over all
    tokens of the batch. Tokens of wrong completions have rp = 0, and tokens of correct completions
    have rn = 0. The option `norm = "polarity"` follows another interpretation of the paper. With
    `norm = "polarity"`, the mean of rp is only over tokens of correct completions, and the mean of
    rn is only over tokens of wrong completions. The standard deviations of rp and rn are over the
    same tokens as the means of rp and rn. With `norm = "polarity"`, alpha1 and alpha2 cancel out,
    and about half the tokens of correct completions get a negative advantage.

    By default, `gtpo` sums entropies over the group, as in the paper's equations. The paper's
    experiments sum entropies over the batch (`scope = "batch"`). In the factor 1/H, an entropy H
    below `entropy_floor` is replaced by `entropy_floor`. A completion is correct if the reward
    function calls it a success.

    Departure: if all completions of a group are correct, or all are wrong, their advantages are 0.
    In the paper's runs, dynamic sampling drops a group if its completions are all correct or all
    wrong.
    """
    return Objective(
        advantage=shaping.entropy_shaped_tokens,
        surrogate=partial(surrogate.clipped, clip_high=0.28),
        weights=weights.token_mean,
        reads=shaping.SHAPED_BY_ENTROPY,
    )


@takes("bonus", "max_entropy", "entropy_cost", "beta", "kl")
def gtpo_trajectory() -> Objective:
    """Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772: also called GTPO.

        A_i  = R_i - mean_g R - entropy_cost H_i;  0 if H_i > max_entropy
        loss = - 1/N sum_i 1/T_i sum_t exp(logp - sg(logp)) A_i delta[i,t] / max(1, conflicts_i)

    H_i is the mean entropy of completion i. A completion is good if its reward is above the group's
    mean, and bad if its reward is below the group's mean. A conflict token is a token of a prefix
    or suffix that a good and a bad completion of the group have in common; tokens that are not
    trained, such as those of tools, are left out of the comparison. The factor delta of a
    conflict token is `bonus` in a good completion and 0 in a bad completion. With delta = 0, bad
    completions do not lower the probability of the format that all completions share. The factor
    delta is squared for a token that is in a common prefix and in a common suffix. For a token that
    is not a conflict token, delta is 1. `gtpo_trajectory` has no ratio, no clip and no reference.

    Departures: the entropy H_i is computed once, when the batch is collected, so the advantage does
    not change between optimizer steps. The authors' code computes the entropy again in every
    optimizer step. In a group with equal rewards, Covey's advantages are 0. In the authors' code,
    completion i of a group with equal rewards has the advantage -entropy_cost H_i.
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

    Choices: the covariance cov is computed over the whole optimizer step instead of per
    micro-batch, at the cost of one more forward pass. The random choice of tokens uses a hash of
    the engine's log-probs, so the choice does not depend on the order of completions or on the
    micro-batches.
    """
    return Objective(
        advantage=advantage.group_standardized,
        surrogate=surrogate.clipped_without_marked,
        weights=weights.token_mean,
        marks=marks.random_within_bounds,
    )


@takes("share", "coefficient", "beta", "kl", "ddof", "eps")
def kl_cov() -> Objective:
    """KL-Cov, arXiv 2505.22617: a KL penalty on the few tokens that lower the entropy most.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    `kl_cov` does not clip ratios, and penalizes only tokens with a positive covariance. Covey
    computes the covariance over a whole optimizer step instead of per micro-batch, at the cost of
    one more forward pass.
    """
    return Objective(
        advantage=advantage.group_standardized,
        surrogate=surrogate.penalized_where_marked,
        weights=weights.token_mean,
        marks=marks.largest,
    )
