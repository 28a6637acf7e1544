"""Algorithms whose advantages depend on token entropies or token ids, not only on rewards.

This module contains the entropy-shaped advantages of GTPO and GRPO-S (arXiv 2508.04349, v5). The
function `without_conflicts` is the advantage of an unrelated algorithm (arXiv 2508.03772) that is
called GTPO too. The entropy H is the entropy of the policy that collected the batch.

In the formulas, O+ are the correct completions and O- are the wrong completions. If all completions
of a group are correct, or all are wrong, their advantages are 0. Means and standard deviations
leave out groups whose completions are all correct or all wrong, because advantages within these
groups would depend on entropies alone. In the experiments of arXiv 2508.04349, dynamic sampling
drops groups whose completions are all correct or all wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from covey.objective import ratio, surrogate, weights
from covey.objective.advantage import (
    all_equal,
    centered,
    group_sum,
    per_token,
    rollout_rewards,
    rows_of_groups,
    standardized,
    zero_variance,
)
from covey.objective.loss import Need, Objective
from covey.objective.masked import row_mean
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl
from covey.types import Batch

Scope = Literal["group", "batch"]
SHAPED_BY_ENTROPY: frozenset[Need] = frozenset({"groups", "old_entropy", "success"})
WITHOUT_CONFLICTS: frozenset[Need] = frozenset({"groups", "old_entropy", "tokens"})
"""The inputs that the advantage functions of this module read."""


def polarity(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks [B] of correct and of wrong completions, in groups that have both kinds."""
    # A completion without trained tokens has no entropy.
    scored = ~batch.rewards.isnan() & batch.mask.any(dim=1)
    correct, wrong = scored & batch.success, scored & ~batch.success
    mixed = (group_sum(correct.double(), batch.group) > 0) & (
        group_sum(wrong.double(), batch.group) > 0
    )
    return correct & mixed, wrong & mixed


def entropy_shaped_tokens(
    batch: Batch,
    *,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    scope: Scope = "group",
    norm: Literal["batch", "polarity"] = "batch",
    ddof: int = 0,
    eps: float = 1e-6,
    entropy_floor: float = 1e-3,
) -> torch.Tensor:
    """GTPO, equations 2 to 4: rewards shaped by token entropy, over the batch's tokens."""
    correct, wrong = polarity(batch)
    of_correct, of_wrong = batch.mask & correct[:, None], batch.mask & wrong[:, None]
    entropy = _entropy(batch)
    group = batch.group if scope == "group" else torch.zeros_like(batch.group)
    shaped_correct = alpha1 + alpha2 * _share(entropy.clamp(min=1e-12), of_correct, group)
    shaped_wrong = -alpha1 - alpha2 * _share(1 / entropy.clamp(min=entropy_floor), of_wrong, group)
    advantage = torch.zeros_like(entropy)
    for shaped, mine in ((shaped_correct, of_correct), (shaped_wrong, of_wrong)):
        among = mine if norm == "polarity" else of_correct | of_wrong
        values = shaped.where(mine, 0.0)[among]
        if not all_equal(values):
            difference = values - values.mean()
            deviation = (difference.square().sum() / max(1, len(values) - ddof)).sqrt()
            advantage += ((shaped - values.mean()) / (deviation + eps)).where(mine, 0.0)
    return advantage


def _share(values: torch.Tensor, mask: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Divide each token's value by the mean of the group's values at the same token position."""
    total = group_sum(values.where(mask, 0.0), group)
    return values / total.where(total > 0, 1.0) * group_sum(mask.double(), group)


def entropy_shaped_sequences(
    batch: Batch,
    *,
    beta1: float = 1.0,
    beta2: float = 0.1,
    scope: Scope = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    entropy_floor: float = 1e-3,
) -> torch.Tensor:
    """GRPO-S, equation 6: rewards shaped by a rollout's mean entropy, standardized in the group."""
    correct, wrong = polarity(batch)
    entropy = row_mean(_entropy(batch), batch.mask)
    group = batch.group if scope == "group" else torch.zeros_like(batch.group)
    bonus = _share(entropy.clamp(min=1e-12), correct[:, None], group)
    malus = _share(1 / entropy.clamp(min=entropy_floor), wrong[:, None], group)
    shaped = torch.where(correct[:, None], beta1 + beta2 * bonus, -beta1 - beta2 * malus).squeeze(1)
    shaped = shaped.where(correct | wrong, torch.nan)
    return per_token(standardized(shaped, batch.group, ddof=ddof, eps=eps), batch.mask)


def without_conflicts(
    batch: Batch,
    *,
    bonus: float = 2.0,
    max_entropy: float = 0.7,
    entropy_cost: float = 0.1,
) -> torch.Tensor:
    """GTPO (arXiv 2508.03772), which gives no gradient to shared tokens in bad completions."""
    rewards = rollout_rewards(batch)
    difference = centered(rewards, batch.group)
    factor, conflicts = _conflicts(batch, difference, bonus)
    entropy = row_mean(_entropy(batch), batch.mask).squeeze(1)
    flat = zero_variance(rewards, batch.group) | rewards.isnan()
    advantage = (difference - entropy_cost * entropy).where(~flat & (entropy <= max_entropy), 0.0)
    return per_token(advantage / conflicts.clamp(min=1), batch.mask) * factor


def _conflicts(
    batch: Batch, advantage: torch.Tensor, bonus: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a factor for each token's advantage, and the number of conflict tokens in each row."""
    columns = torch.arange(batch.mask.shape[1], device=batch.mask.device)
    # Both orders put the trained tokens first: the k-th trained token of a completion, from the
    # start or from the end, is compared with the k-th of another, even if a gap lies between.
    from_start = columns.where(batch.mask, len(columns)).argsort(dim=1, stable=True)
    from_end = columns.where(batch.mask, -1).argsort(dim=1, descending=True, stable=True)
    good = (advantage > 0)[:, None]
    factor = torch.ones_like(batch.mask, dtype=torch.float64)
    conflict = torch.zeros_like(batch.mask)
    for order in (from_start, from_end):
        run = _conflict_run(batch, order, advantage)
        factor = factor.where(~run, factor * torch.where(good, bonus, 0.0))
        conflict |= run
    return factor, conflict.sum(dim=1)


def _conflict_run(batch: Batch, order: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, T] of the prefix, in the given order of columns, that good and bad
    completions of a group share."""
    tokens, mask = batch.tokens.gather(1, order), batch.mask.gather(1, order)
    shared = torch.zeros_like(mask)
    for rows in rows_of_groups(batch.group, mask.any(dim=1)):
        ids, seen, sign = tokens[rows], mask[rows], advantage[rows]
        same = (ids[:, None] == ids[None]) & seen[:, None] & seen[None]  # [G, G, T]
        with_good = (same & (sign > 0)[None, :, None]).any(dim=1)
        with_bad = (same & (sign < 0)[None, :, None]).any(dim=1)
        shared[rows] = with_good & with_bad
    return torch.zeros_like(mask).scatter(1, order, shared.long().cumprod(dim=1).bool())


def _entropy(batch: Batch) -> torch.Tensor:
    assert batch.entropy is not None, "an objective that reads entropies must declare it"
    return batch.entropy.double().where(batch.mask, 0.0)


@algorithm(title="Group Token Policy Optimization", source="arXiv 2508.04349 (v5)")
def gtpo(
    *, clip_low: float = 0.2, clip_high: float = 0.28, alpha1: float = 1.0, alpha2: float = 0.1,
    scope: Scope = "group", norm: Literal['batch', 'polarity'] = "batch", beta: float = 0.0,
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
            entropy_shaped_tokens,
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
        reads=SHAPED_BY_ENTROPY,
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
            without_conflicts,
            bonus=bonus,
            max_entropy=max_entropy,
            entropy_cost=entropy_cost,
        ),
        ratio=ratio.one,
        surrogate=surrogate.unclipped,
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=WITHOUT_CONFLICTS,
    )


@algorithm(title="GRPO-S", source="arXiv 2508.04349 (v5)")
def grpo_s(
    *, clip_low: float = 0.2, clip_high: float = 0.28, beta1: float = 1.0, beta2: float = 0.1,
    mean: Literal["geometric", "arithmetic"] = "geometric", scope: Scope = "group",
    beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
    entropy_floor: float = 1e-3,
) -> Objective:  # fmt: skip
    """Rewards shaped by the mean entropy H_i of each completion.

        rs_i =  beta1 + beta2 n H_i / sum_{k in O+} H_k            for the n correct completions, O+
        rs_j = -beta1 - beta2 m (1/H_j) / sum_{k in O-} 1/H_k      for the m wrong ones, O-
        A_i  = (rs_i - mean_g rs) / (std_g rs + eps)
        w_i  = exp( 1/T_i sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(w A, clip(w, 1-clip_low, 1+clip_high) A)

    Choices: the paper defines the ratio w of a completion in two ways. Algorithm 1 of the paper
    takes the geometric mean of token ratios, which is Covey's default. Equation 8 of the paper
    takes the arithmetic mean (`mean = "arithmetic"`). Clip bounds of 0.2 and 0.28 have practically
    no effect on the geometric mean. Entropies are summed over the group, as in the paper's
    equations. The paper's runs sum entropies over the batch (`scope = "batch"`). In the factor 1/H,
    an entropy H below `entropy_floor` is replaced by `entropy_floor`. A completion is correct if
    the reward function calls it a success.

    Departure: if all completions of a group are correct, or all are wrong, their advantages are 0.
    In the paper's runs, dynamic sampling drops a group if its completions are all correct or all
    wrong.
    """
    return Objective(
        advantage=partial(
            entropy_shaped_sequences,
            beta1=beta1,
            beta2=beta2,
            scope=scope,
            ddof=ddof,
            eps=eps,
            entropy_floor=entropy_floor,
        ),
        ratio=ratio.sequence if mean == "geometric" else ratio.arithmetic,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=SHAPED_BY_ENTROPY,
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "gtpo": gtpo,
    "gtpo_trajectory": gtpo_trajectory,
    "grpo_s": grpo_s,
}
