"""Algorithms that compare pairs: the best completion of a group against the worst."""

from __future__ import annotations

from collections.abc import Callable

from covey.objective import pairs, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective
from covey.objective.surrogate import Gain


def _of_pairs(surrogate: Callable[..., Gain]) -> Objective:
    return Objective(
        advantage=pairs.best_against_worst,
        surrogate=surrogate,
        weights=weights.group_mean_sequence_sum,
        marks=pairs.margins,
        beta=0.1,
        kl_in="pair",
    )


@takes("beta", "average")
def dpo() -> Objective:
    """Direct Preference Optimization, arXiv 2305.18290; pairs are sampled or from a file.

        D    = sum_t (logp - ref_logp)[chosen] - sum_t (logp - ref_logp)[rejected]
        loss = - 1/pairs sum log sigmoid(beta D)

    The chosen completion has the highest reward of its group, and the rejected completion has the
    lowest; the other completions are not trained on. Among completions with equal rewards, the
    shortest is taken, and among equally short ones, the first. A group whose rewards are all equal
    has no pair, and the metric `pairs/ties` counts such groups. With the configuration section
    [preferences], pairs are read from a file.

    The two completions of a pair may be in different micro-batches or on different ranks. Before
    each optimizer step, one more forward pass therefore computes the margin D of all pairs in the
    step.

    Choice: the loss is a mean over the pairs of a training step, so every pair has the same weight,
    whichever optimizer step trains on it. With the option `average`, the margin D contains means
    over the tokens of a completion instead of sums.

    Worth knowing: if policy and reference agree, the gradient is that of REINFORCE with advantages
    of beta / 2 and -beta / 2. DPO has no importance ratio, so it does not correct for stale pairs.
    TRL's online DPO also makes pairs from completions with equal rewards.
    """
    return _of_pairs(pairs.logistic)


@takes("beta", "average")
def ipo() -> Objective:
    """Identity Preference Optimization, arXiv 2310.12036: a squared loss on pair margins.

        D    = mean_t (logp - ref_logp)[chosen] - mean_t (logp - ref_logp)[rejected]
        loss = 1/pairs sum (D - 1 / (2 beta))^2

    `ipo` chooses pairs as `dpo` does. The loss of `ipo` moves the margin D towards 1 / (2 beta),
    while the loss of `dpo` increases D without limit. With `ipo`, the policy therefore stays near
    the reference, even if it already prefers the chosen completion in every pair.

    Choice: the margin D uses means over tokens, as in TRL's DPO trainer, whose developers asked the
    authors of IPO whether to use means or sums. The paper's formula and OpenRLHF use sums, as Covey
    does with `average = false`.
    """
    return _of_pairs(pairs.squared)
