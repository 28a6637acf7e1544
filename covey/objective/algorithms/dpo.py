"""Pairwise losses (DPO, IPO), which compare the best completion of a group with the worst.

    D    = g(chosen) - g(rejected),  g = sum over tokens of logp - ref_logp, or their mean
    loss = mean over pairs of l(D)

The loss of a pair depends on two rows, which may be in different micro-batches or on different
ranks. Covey first computes the margin D of every pair in the optimizer step, in an additional
forward pass without gradient (`marks`). In the training pass, each row contributes half of the loss
l(D). The row's contribution has the whole gradient of l(D) with respect to the row's log-ratio g:

    loss_row = l(D) / 2 + l'(D) s (g - const g),  s = +1 chosen, -1 rejected

The contributions of all rows add up to the loss and the gradient of all pairs, for any split of the
optimizer step into micro-batches and over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from covey.objective import weights
from covey.objective.advantage import (
    group_sum,
    per_token,
    rollout_rewards,
    rows_of_groups,
    zero_variance,
)
from covey.objective.loss import Objective
from covey.objective.masked import difference, row_sum, row_tokens, spread
from covey.objective.options import algorithm
from covey.objective.surrogate import Gain, Tokens, unbounded
from covey.types import Batch


def best_against_worst(batch: Batch) -> torch.Tensor:
    """Return the advantage c for the best completion of a group, -c for the worst, else 0.

    Among completions with equal rewards, the function takes the shortest. Among equally short
    completions, the function takes the first. A group whose rewards are all equal has no pair. The
    value c is the number of scored groups divided by the number of pairs. The factor c turns a mean
    over all scored groups into a mean over the groups that have a pair.
    """
    rewards, lengths = rollout_rewards(batch), batch.mask.sum(dim=1)
    able = ~rewards.isnan() & (lengths > 0)
    among = rewards.where(able, torch.nan)
    paired = able & ~zero_variance(among, batch.group)
    sign = torch.zeros_like(rewards, dtype=torch.float64)
    groups, pairs = len(batch.group[~rewards.isnan()].unique()), 0
    for rows in rows_of_groups(batch.group, paired):
        if len(rows):
            rows = rows[lengths[rows].argsort(stable=True)]
            sign[rows[rewards[rows].argmax()]] = 1.0
            sign[rows[rewards[rows].argmin()]] = -1.0
            pairs += 1
    return per_token(sign * (groups / max(1, pairs)), batch.mask)


def margins(batch: Batch, logp: torch.Tensor, *, average: bool = False) -> torch.Tensor:
    """Return the margin D of each row's pair, [B, T]; NaN for rows without a complete pair."""
    assert batch.advantage is not None
    assert batch.ref_logp is not None, "a pair is compared with the reference"
    gain = log_ratio(logp, batch.ref_logp, batch.mask, average=average).double().squeeze(1)
    sign = batch.advantage.where(batch.mask, 0.0).sum(dim=1).sign()
    best, worst = (group_sum(side.long(), batch.group) for side in (sign > 0, sign < 0))
    whole = (best == 1) & (worst == 1) & (sign != 0)
    margin = group_sum(sign * gain, batch.group).where(whole, torch.nan)
    return margin[:, None].expand_as(batch.mask)


def log_ratio(
    logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor, *, average: bool
) -> torch.Tensor:
    """Return the sum or the mean of logp - ref_logp over the trained tokens of each row, [B, 1]."""
    total = row_sum(difference(logp, ref_logp, mask), mask)
    return total / row_tokens(mask) if average else total


def logistic(tokens: Tokens, *, average: bool = False) -> Gain:
    """The logistic loss of a pair's margin, -log sigmoid(beta D). DPO, arXiv 2305.18290."""
    margin, beta = _margin(tokens), tokens.beta
    loss = -torch.nn.functional.logsigmoid(beta * margin)
    slope = -beta * torch.sigmoid(-beta * margin)
    return _gain(tokens, loss=loss, slope=slope, average=average)


def squared(tokens: Tokens, *, average: bool = True) -> Gain:
    """The squared loss of a pair's margin, (D - 1 / (2 beta))^2. IPO, arXiv 2310.12036."""
    off = _margin(tokens) - 1 / (2 * tokens.beta)
    return _gain(tokens, loss=off.square(), slope=2 * off, average=average)


def _margin(tokens: Tokens) -> torch.Tensor:
    assert tokens.marked is not None, "with_marks comes first"
    # Without this, NaN would get into the gradient of rows without a pair.
    return tokens.marked.to(tokens.logp.dtype).nan_to_num(nan=0.0)


def _gain(tokens: Tokens, *, loss: torch.Tensor, slope: torch.Tensor, average: bool) -> Gain:
    """Return each row's contribution to its pair's negative loss, copied to every token."""
    assert tokens.ref_logp is not None
    assert tokens.marked is not None
    side = log_ratio(tokens.logp, tokens.ref_logp, tokens.mask, average=average)
    own = spread(side - side.detach(), tokens.mask)
    gain = -(tokens.advantage.abs() * loss / 2 + tokens.advantage * slope * own)
    return unbounded(gain.where(~tokens.marked.isnan(), 0.0), tokens)


def _of_pairs(surrogate: Callable[..., Gain], beta: float, average: bool) -> Objective:
    return Objective(
        advantage=best_against_worst,
        surrogate=partial(surrogate, average=average),
        weights=weights.group_mean_sequence_sum,
        marks=partial(margins, average=average),
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
    return _of_pairs(logistic, beta, average)


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
    return _of_pairs(squared, beta, average)


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "dpo": dpo,
    "ipo": ipo,
}
