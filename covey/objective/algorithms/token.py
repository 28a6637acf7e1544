"""Algorithms that weight tokens by entropy, covariance or conflicts between completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, marks, ratio, shaping, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(title="Group Token Policy Optimization", source="arXiv 2508.04349 (v5)")
def gtpo(
    *, clip_low: float = 0.2, clip_high: float = 0.28, alpha1: float = 1.0, alpha2: float = 0.1,
    scope: shaping.Scope = "group", norm: Literal['batch', 'polarity'] = "batch", beta: float = 0.0,
    kl: Kl = "k3", ddof: int = 0, eps: float = 1e-6, entropy_floor: float = 1e-3,
) -> Objective:  # fmt: skip
    """Rewards shaped by token entropy H.

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
        advantage=partial(
            shaping.entropy_shaped_tokens,
            alpha1=alpha1,
            alpha2=alpha2,
            scope=scope,
            norm=norm,
            ddof=ddof,
            eps=eps,
            entropy_floor=entropy_floor,
        ),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=shaping.SHAPED_BY_ENTROPY,
    )


@algorithm(title="Group-relative Trajectory-based Policy Optimization", source="arXiv 2508.03772")
def gtpo_trajectory(
    *, bonus: float = 2.0, max_entropy: float = 0.7, entropy_cost: float = 0.1, beta: float = 0.0,
    kl: Kl = "k3",
) -> Objective:  # fmt: skip
    """Also called GTPO.

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
        advantage=partial(
            shaping.without_conflicts,
            bonus=bonus,
            max_entropy=max_entropy,
            entropy_cost=entropy_cost,
        ),
        ratio=ratio.one,
        surrogate=surrogate.unclipped,
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=shaping.WITHOUT_CONFLICTS,
    )


@algorithm(title="Clip-Cov", source="arXiv 2505.22617")
def clip_cov(
    *, clip_low: float = 1.0, clip_high: float = 1.0, share: float = 2e-4, cov_low: float = 1.0,
    cov_high: float = 5.0, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """No gradient for the few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A), but 0 for
               max(1, share T) random tokens with cov_low < cov < cov_high that are not clipped

    Choices: the covariance cov is computed over the whole optimizer step instead of per
    micro-batch, at the cost of one more forward pass. The random choice of tokens uses a hash of
    the engine's log-probs, so the choice does not depend on the order of completions or on the
    micro-batches.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped_without_marked, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        marks=partial(
            marks.random_within_bounds,
            share=share,
            cov_low=cov_low,
            cov_high=cov_high,
            clip_low=clip_low,
            clip_high=clip_high,
        ),
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="KL-Cov", source="arXiv 2505.22617")
def kl_cov(
    *, share: float = 2e-4, coefficient: float = 1.0, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """A KL penalty on the few tokens that lower the entropy most.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    `kl_cov` does not clip ratios, and penalizes only tokens with a positive covariance. Covey
    computes the covariance over a whole optimizer step instead of per micro-batch, at the cost of
    one more forward pass.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.penalized_where_marked, coefficient=coefficient),
        weights=weights.token_mean,
        marks=partial(marks.largest, share=share),
        beta=beta,
        penalty=PENALTIES[kl],
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "gtpo": gtpo,
    "gtpo_trajectory": gtpo_trajectory,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
