"""Algorithms that differ from GRPO in how advantages are computed from the rewards of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(
    title="Group reward-Decoupled normalization Policy Optimization",
    source="arXiv 2601.05242",
)
def gdpo(
    *, parts: tuple[str, ...] = (), part_weights: tuple[float, ...] = (), gate: int = -1,
    gate_at: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0,
    beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        a_k[i] = (R_k[i] - mean_g R_k) / (std_g R_k + eps)        for each part k of the reward
        a[i]   = sum_k part_weights[k] a_k[i]
        A_i    = (a[i] - mean a) / (std a + eps)                  over the completions of the step
        loss   = - 1/N sum_i 1/T_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    A part of the reward with a small spread has the same influence as a part with a large spread.
    The weights in `part_weights` multiply advantages, not rewards, so scaling a part of the reward
    does not change the influence of this part. The option `gate` is the index of the gating part.
    If the gating part of a completion's reward is below `gate_at`, all other parts count as 0
    (equation 8). In a configuration, `parts` lists the names of the reward parts to use, in the
    same order as `part_weights`. Without `parts`, `gdpo` uses every number that the reward function
    reports, including numbers that are not meant as rewards.

    Choices: the summed advantages a[i] are standardized over completions, as in the paper and in
    TRL. In verl, the summed advantages are standardized over tokens, so long completions count
    more. If one part of a completion's reward could not be computed, the completion is left out of
    all means and standard deviations.

    Worth knowing: if the reward has only one part, the loss is GRPO's loss times a factor that is
    constant within a training step. `gdpo` refuses a KL penalty in the reward, because `gdpo`
    normalizes only numbers that the reward function reports. With `gdpo`, put the KL penalty into
    the loss.
    """
    return Objective(
        advantage=partial(
            advantage.parts_standardized,
            part_weights=part_weights,
            gate=gate,
            gate_at=gate_at,
            ddof=ddof,
            eps=eps,
        ),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        parts=tuple(parts),
        reads=frozenset({"groups", "parts"}),
    )


@algorithm(title="Maximum likelihood RL", source="arXiv 2602.02710")
def maxrl(
    *, length: int, all_wrong: Literal['zero', 'minus_one'] = "zero", clip_low: float = 0.2,
    clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3",
) -> Objective:  # fmt: skip
    """Prompts with a low pass rate count more.

        A_i  = (R_i - mean_g R) / mean_g R,  and 0 where every reward is 0
        loss = - 1/(N length) sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    `maxrl` weights each group by 1 / (pass rate of the group). With binary rewards and groups of G
    completions, the expected gradient is the gradient of a series expansion of log(pass rate) to
    order G - 1. With `all_wrong = "minus_one"`, completions in groups without success get an
    advantage of -1. With `all_wrong = "minus_one"`, the series expansion of log(pass rate) has
    order G, but the gradient has much more noise.

    Choice: sums over tokens are divided by a constant length, as in Dr.GRPO. The code of MaxRL's
    authors takes the mean over tokens, so its gradient estimate is biased. Rewards must not be
    negative.

    Worth knowing: with binary rewards and groups of two completions, `maxrl` is RLOO.
    """
    return Objective(
        advantage=partial(advantage.divided_by_mean, all_wrong=all_wrong),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=partial(weights.sequence_mean_token_sum_norm, length=length),
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Pass-at-k Policy Optimization", source="arXiv 2505.15201")
def pkpo(
    *, length: int, k: int = 4, baseline: advantage.Baseline = "loo1", clip_low: float = 0.2,
    clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3",
) -> Objective:  # fmt: skip
    """Trains for the best of k completions.

        A_i  = n (s_i - baseline_i),  s_i = k/n times the mean of max over k-subsets that contain i
        loss = - 1/(N length) sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The expected gradient is the gradient of max@k, which is pass@k for binary rewards. The gradient
    is unbiased with every choice of `baseline`. Among the baselines in the paper, the default
    `loo1` has the least variance. With `loo1`, the advantage measures how much the completion
    raises the best reward of k - 1 other completions, so the advantage is never negative. With
    `centred`, the advantages of a group add up to 0. With `loo`, the baseline is equation 29 of the
    paper.

    Choices: to keep the gradient unbiased, Covey divides by a constant length and does not divide
    by a standard deviation. If all rewards of a group are equal, Covey sets the group's advantages
    to 0. With the baselines `loo1` and `centred`, the advantages of equal rewards are always 0.
    With `loo`, setting the advantages of equal rewards to 0 makes the gradient biased.

    Worth knowing: with k = 1, `pkpo` is RLOO. With `loo1` and binary rewards, a group of G
    completions with more than G-k+1 successes has no gradient. As the policy learns to solve more
    prompts, lower k.
    """
    return Objective(
        advantage=partial(advantage.best_of_k, k=k, baseline=baseline),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=partial(weights.sequence_mean_token_sum_norm, length=length),
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Group Filtered Policy Optimization", source="arXiv 2508.09726")
def gfpo(
    *, keep: int = 4, metric: advantage.Metric = "length", clip_low: float = 0.2,
    clip_high: float = 0.2, dual: float = 0.0, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Sample more, train on the best k.

        S    = the `keep` best completions of a group: the shortest, or most reward per token
        A_i  = (R_i - mean_S R) / (std_S R + eps) in S, 0 outside
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The token count T includes all scored completions, as in equation 2 of the paper. In TRL's
    implementation of GFPO, T counted only the tokens of kept completions. With
    `filter.skip_zero_gradient`, completions that are not kept need no forward pass. The default of
    `ddof` is 1, as in `grpo`, but the paper uses 0. Training on half of each group (4 of 8
    completions) is a good default.

    Worth knowing: if the `keep` shortest completions of a group are all wrong, the group has no
    gradient, even if longer completions are correct. If `keep` is at least the group size, `gfpo`
    equals `grpo` with a mean over tokens.
    """
    return Objective(
        advantage=partial(
            advantage.kept_standardized, keep=keep, metric=metric, ddof=ddof, eps=eps
        ),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="The loss of ScaleRL", source="arXiv 2510.13786")
def scalerl(
    *, max_weight: float = 5.0, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Truncated importance weights, mean over prompts.

        A_i  = (R_i - mean_g R) / (std (R - mean_g R) + eps),  the std over mixed groups
        loss = - 1/P sum_g 1/T_g sum_i sum_t sg(min(r, max_weight)) A logp
        r    = exp(logp - sampler_logp),  P = number of mixed groups

    A mixed group is a group whose rewards are not all equal. The paper does not say over which
    completions the standard deviation is computed. Covey computes the standard deviation over all
    completions of mixed groups.

    The ScaleRL recipe contains more than the loss. In the ScaleRL recipe, groups with equal rewards
    are dropped without replacement (`filter.drop_flat`), and prompts that the policy already solves
    are no longer drawn (`curriculum.drop_above`). The ScaleRL recipe runs the LM head in float32 in
    the engine and in the trainer.
    """
    return Objective(
        advantage=partial(advantage.mixed_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.truncated_weight, max_weight=max_weight),
        weights=weights.group_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=frozenset({"groups", "sampler_as_old"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "gdpo": gdpo,
    "maxrl": maxrl,
    "pkpo": pkpo,
    "gfpo": gfpo,
    "scalerl": scalerl,
}
