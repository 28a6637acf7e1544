"""Advantages that depend on token entropies or token ids, not only on rewards.

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

from typing import TYPE_CHECKING, Literal

import torch

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
from covey.objective.masked import row_mean
from covey.types import Batch

if TYPE_CHECKING:
    from covey.objective.loss import Need

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
    """GTPO, equations 2 to 4: rewards shaped by token entropy, normalized over the batch's tokens.

    In correct completions, tokens with high entropy get a bonus. In wrong completions, tokens with
    low entropy get a penalty.
    """
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
    """GTPO (arXiv 2508.03772), which gives no gradient to shared tokens in bad completions.

    The advantage of a completion is A_i = R_i - mean_g R - entropy_cost H_i. The term mean_g R is
    the group's mean reward, and H_i is the completion's mean entropy. A_i is 0 if H_i exceeds
    `max_entropy`. A completion with R_i > mean_g R is good, and a completion with R_i < mean_g R is
    bad. A conflict token is a token of a prefix or suffix that a good and a bad completion of the
    group have in common. The advantage A_i is divided by the completion's number of conflict
    tokens. The advantage of a conflict token is multiplied by `bonus` in good completions and by 0
    in bad completions.
    """
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
