"""Algorithms that compare pairs: the best completion of a group against the worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from covey.objective import pairs, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.surrogate import Gain


def _of_pairs(surrogate: Callable[..., Gain], beta: float, average: bool) -> Objective:
    return Objective(
        advantage=pairs.best_against_worst,
        surrogate=partial(surrogate, average=average),
        weights=weights.group_mean_sequence_sum,
        marks=partial(pairs.margins, average=average),
        beta=beta,
        kl_in="pair",
    )


@algorithm(title="Direct Preference Optimization", source="arXiv 2305.18290", pairs=True)
def dpo(*, beta: float = 0.1, average: bool = False) -> Objective:
    """Pairs are sampled or from a file.

        D    = sum_t (logp - ref_logp)[chosen] - sum_t (logp - ref_logp)[rejected]
        loss = - 1/pairs sum log sigmoid(beta D)

    The chosen completion has the highest reward of its group, and the rejected completion has the
    lowest. Covey does not train on completions that are not in a pair. If several completions of a
    group share the highest or the lowest reward, Covey takes the shortest of them for the pair.
    Among equally short completions, Covey takes the first. A group whose rewards are all equal has
    no pair, and the metric `pairs/ties` counts such groups. With the configuration section
    [preferences], Covey reads pairs from a file.

    The two completions of a pair may be in different micro-batches or on different ranks. Before
    each optimizer step, one more forward pass computes the margin D of all pairs in the step.

    Choice: the loss is a mean over the pairs of a training step, so all pairs of a training step
    have the same weight. With the option `average`, the margin D uses the mean log-ratio of a
    completion's tokens instead of the sum of log-ratios.

    Worth knowing: if policy and reference agree, the gradient equals the gradient of REINFORCE with
    advantages of beta / 2 and -beta / 2. DPO has no importance ratio, so it does not correct for
    stale pairs. Unlike Covey, TRL's online DPO makes pairs even from completions with equal
    rewards.
    """
    return _of_pairs(pairs.logistic, beta, average)


@algorithm(title="Identity Preference Optimization", source="arXiv 2310.12036", pairs=True)
def ipo(*, beta: float = 0.1, average: bool = True) -> Objective:
    """A squared loss on pair margins.

        D    = mean_t (logp - ref_logp)[chosen] - mean_t (logp - ref_logp)[rejected]
        loss = 1/pairs sum (D - 1 / (2 beta))^2

    `ipo` chooses pairs as `dpo` does. The loss of `dpo` increases the margin D without limit, but
    the loss of `ipo` moves D towards 1 / (2 beta). With `ipo`, the policy stays near the reference,
    even if it already prefers the chosen completion in every pair.

    Choice: the margin D uses means over tokens. TRL's DPO trainer uses means over tokens too,
    because TRL's developers consulted the authors of IPO. The paper's formula and OpenRLHF use
    sums, as Covey does with `average = false`.
    """
    return _of_pairs(pairs.squared, beta, average)


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "dpo": dpo,
    "ipo": ipo,
}
