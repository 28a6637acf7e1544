"""Algorithms that compare pairs: the best completion of a group against the worst."""

from __future__ import annotations

from collections.abc import Callable

from covey.objective import pairs, ratio, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective
from covey.objective.surrogate import Gain


def _of_pairs(surrogate: Callable[..., Gain]) -> Objective:
    return Objective(
        advantage=pairs.best_against_worst,
        ratio=ratio.token,
        surrogate=surrogate,
        weights=weights.group_mean_sequence_sum,
        marks=pairs.margins,
        beta=0.1,
        kl_in="pair",
    )


@takes("beta", "average")
def dpo() -> Objective:
    """Direct Preference Optimization, arXiv 2305.18290; of sampled groups it is online DPO.

        D    = sum_t (logp - ref_logp)[chosen] - sum_t (logp - ref_logp)[rejected]
        loss = - 1/pairs sum log sigmoid(beta D)

    The chosen completion is the best of its group, and the rejected completion is the worst. Ties
    go to the shorter completion, then to the earlier one. The other completions of the group are
    not trained on. A group with equal rewards has no pair; the metric `pairs/ties` counts such
    groups. Pairs may also come from a file: see the section [preferences].

    The two sides of a pair may be in different micro-batches or ranks. So D is computed for the
    whole optimizer step first, at the cost of one more forward pass over the pairs.

    Choice: the mean is over the pairs of a training step, so every pair has the same weight in
    whichever optimizer step it is. `average` divides the sums by the lengths.

    Worth knowing: where policy and reference agree, the gradient is that of REINFORCE with
    advantages of beta / 2 and -beta / 2. There is no ratio, so stale pairs are not corrected for.
    TRL's online DPO also makes pairs from equal rewards.
    """
    return _of_pairs(pairs.logistic)


@takes("beta", "average")
def ipo() -> Objective:
    """Identity Preference Optimization, arXiv 2310.12036: a squared loss of pairs.

        D    = mean_t (logp - ref_logp)[chosen] - mean_t (logp - ref_logp)[rejected]
        loss = 1/pairs sum (D - 1 / (2 beta))^2

    Pairs are chosen as in `dpo`. Unlike in `dpo`, D has a target, 1 / (2 beta), and a larger D is
    pulled back. So even a policy that separates every pair stays near the reference.

    Choice: D has means over tokens, as in TRL's DPO trainer after asking the authors. The paper's
    formula and OpenRLHF have sums over tokens: `average = false`.
    """
    return _of_pairs(pairs.squared)
