"""Advantages: the difference between a rollout's reward and a baseline, such as its group's mean.

Shapes: B is the number of rollouts, and T is the number of completion tokens. Rewards, means and
standard deviations are float64. In float32, rounding can give equal rewards a standard deviation of
3e-8, and dividing by 3e-8 would give advantages near 1.

The functions in the first half of this module take the rewards [B] and the group ids [B] of a whole
rollout batch. The rollouts may be in any order, and groups may have any size. Means and standard
deviations are over a group or over the whole batch. A NaN reward means that scoring failed. A
rollout with a NaN reward is left out of all means and standard deviations, and has the advantage 0.

The functions in the second half of this module take a batch and return the advantages of all tokens
[B, T]. The field `advantage` of an `Objective` is a function of a batch, and its keyword arguments
are options of the objective. The decorator `of_rewards` turns a function of rewards and group ids
into a function of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from math import comb
from types import MappingProxyType
from typing import Any, Literal

import torch

from covey.errors import ConfigError
from covey.objective.masked import row_sum, scored_tokens, spread
from covey.types import EQUAL_REWARDS, Batch

Metric = Literal["length", "rate"]
Baseline = Literal["loo1", "loo", "centred"]


def group_sum(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return the sum of each group's values, repeated for every rollout of the group, [B, ...]."""
    ids, index = group.unique(return_inverse=True)
    sums = values.new_zeros(len(ids), *values.shape[1:])
    return sums.index_add(0, index, values)[index]


def rows_of_groups(group: torch.Tensor, among: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each group, yield the indices of the rollouts that the mask `among` [B] selects."""
    for number in group.unique():
        yield ((group == number) & among).nonzero().squeeze(1)


def zero_variance(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return a mask [B] of the rollouts in groups whose rewards are equal up to rounding."""
    rewards = rewards.double()
    ids, index = group.unique(return_inverse=True)

    def extreme(values: torch.Tensor, reduce: str, start: float) -> torch.Tensor:
        seed = values.new_full((len(ids),), start)
        return seed.scatter_reduce(0, index, values, reduce)[index]

    scored = ~rewards.isnan()
    largest = extreme(rewards.where(scored, -torch.inf), "amax", -torch.inf)
    smallest = extreme(rewards.where(scored, torch.inf), "amin", torch.inf)
    size = torch.maximum(largest.abs(), smallest.abs()).clamp(min=1.0)
    return ~(largest - smallest > EQUAL_REWARDS * size)


def against_baseline(
    rewards: torch.Tensor, group: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Return each reward minus its group's weighted mean; `share` [B] contains the weights.

    In a group with equal rewards, all differences from the mean are exactly 0.
    """
    rewards = rewards.double()
    scored = ~rewards.isnan()
    values, share = rewards.where(scored, 0.0), share.double().where(scored, 0.0)
    total = group_sum(share, group)
    baseline = group_sum(share * values, group) / total.where(total > 0, 1.0)
    return (values - baseline).where(scored & ~zero_variance(rewards, group), 0.0)


def centered(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return each reward minus its group's mean reward, A_i = R_i - mean_g R."""
    return against_baseline(rewards, group, torch.ones_like(rewards))


def leave_one_out(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean reward of the other rollouts in its group."""
    count = group_sum((~rewards.isnan()).double(), group)
    return centered(rewards, group) * count / (count - 1).clamp(min=1.0)


def standardized(
    rewards: torch.Tensor, group: torch.Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """Return rewards standardized in their group, A_i = (R_i - mean_g R) / (std_g R + eps).

    In a group with equal rewards, A_i is exactly 0.
    """
    difference = centered(rewards, group)
    count = group_sum((~rewards.isnan()).double(), group)
    variance = group_sum(difference.square(), group) / (count - ddof).clamp(min=1.0)
    return _divided(difference, variance.sqrt() + eps)


def batch_standardized(
    rewards: torch.Tensor,
    group: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    of: Literal["rewards", "centered"] = "rewards",
) -> torch.Tensor:
    """Return (R_i - mean_g R) / (std + eps), where the std is over the whole batch."""
    difference = centered(rewards, group)
    scored = ~rewards.isnan()
    values = rewards.double()[scored] if of == "rewards" else difference[scored]
    squares = (values - values.mean()).square().sum() if len(values) else values.sum()
    return _divided(difference, (squares / max(1, len(values) - ddof)).sqrt() + eps)


def sum_of_standardized(
    parts: torch.Tensor,
    group: torch.Tensor,
    *,
    weights: Sequence[float],
    ddof: int = 1,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Standardize each reward part [K, B] per group, and standardize the parts' weighted sum."""
    scored = ~parts.isnan().any(dim=0)
    alone = [standardized(p.where(scored, torch.nan), group, ddof=ddof, eps=eps) for p in parts]
    total = torch.stack([w * a for w, a in zip(weights, alone, strict=True)]).sum(dim=0)
    # The mean of each group is 0 already, up to rounding.
    return batch_standardized(total.where(scored, torch.nan), group, ddof=ddof, eps=eps)


def all_equal(values: torch.Tensor) -> bool:
    """Return whether all values are equal up to rounding; an empty tensor counts as equal."""
    if not len(values):
        return True
    bound = EQUAL_REWARDS * values.abs().max().clamp(min=1.0)
    return bool(values.max() - values.min() <= bound)


def whitened(
    values: torch.Tensor, mask: torch.Tensor, *, ddof: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    """Whiten values v over all tokens, (v - mean v) / sqrt(var v + eps); equal values become 0."""
    chosen = values.double()[mask]
    result = torch.zeros_like(values, dtype=torch.float64)
    if all_equal(chosen):
        return result
    difference = chosen - chosen.mean()
    variance = difference.square().sum() / max(1, len(chosen) - ddof)
    return result.masked_scatter(mask, difference / (variance + eps).sqrt())


def per_token(advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Copy the advantage [B] of a completion to its trained tokens [B, T]; other tokens get 0."""
    return spread(advantage[:, None], mask)


def rollout_rewards(batch: Batch) -> torch.Tensor:
    """Return the rewards [B]; if `kl_in` is "reward", subtract each rollout's KL penalty."""
    if batch.token_penalty is None:
        return batch.rewards
    return batch.rewards - row_sum(batch.token_penalty.double(), batch.mask).squeeze(1)


def reward_itself(batch: Batch) -> torch.Tensor:
    """The advantage of REINFORCE: the reward itself, A_i = R_i, without a baseline."""
    return per_token(rollout_rewards(batch).nan_to_num(nan=0.0), batch.mask)


def of_rewards(rule: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Turn a function of rewards and group ids into an `advantage` function of a batch."""

    @wraps(rule)
    def advantage(batch: Batch, **options: Any) -> torch.Tensor:
        return per_token(rule(rollout_rewards(batch), batch.group, **options), batch.mask)

    return advantage


group_centered = of_rewards(centered)
group_standardized = of_rewards(standardized)
standardized_by_batch = of_rewards(batch_standardized)
against_the_others = of_rewards(leave_one_out)


def parts_standardized(
    batch: Batch,
    *,
    part_weights: tuple[float, ...] = (),
    gate: int = -1,
    gate_at: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The advantage of GDPO: standardized reward parts, summed and standardized again."""
    assert batch.parts is not None, "gdpo needs the parts of the reward"
    parts = batch.parts.double().masked_fill(batch.rewards.isnan()[:, None], torch.nan)
    count = parts.shape[1]
    weights = [float(weight) for weight in part_weights] or [1.0] * count
    if len(weights) != count:
        raise ConfigError(
            f"gdpo: objective.part_weights has {len(weights)} numbers, but the reward has {count} "
            "parts; give one weight per part"
        )
    if not -1 <= gate < count:
        raise ConfigError(
            f"gdpo: objective.gate = {gate} must be the index of one of the {count} reward parts, "
            "or -1 for no gate"
        )
    if gate >= 0:
        shut = (parts[:, gate] < gate_at)[:, None] & (torch.arange(count) != gate).to(parts.device)
        parts = parts.masked_fill(shut & ~parts.isnan(), 0.0)
    advantage = sum_of_standardized(parts.T, batch.group, weights=weights, ddof=ddof, eps=eps)
    return per_token(advantage, batch.mask)


@of_rewards
def divided_by_mean(
    rewards: torch.Tensor, group: torch.Tensor, *, all_wrong: Literal["zero", "minus_one"] = "zero"
) -> torch.Tensor:
    """The relative distance of the reward from its group's mean, (R_i - mean_g R) / mean_g R.

    MaxRL, arXiv 2602.02710. `all_wrong` sets the advantage in groups whose rewards are all 0.
    """
    scored = ~rewards.isnan()
    if bool((rewards[scored] < 0).any()):
        raise ConfigError("maxrl divides by the mean reward, so rewards must not be negative")
    mean = group_sum(rewards.double().where(scored, 0.0), group)
    mean = mean / group_sum(scored.double(), group).clamp(min=1.0)
    advantage = _divided(centered(rewards, group), mean)
    return advantage.where((mean > 0) | ~scored, -1.0 if all_wrong == "minus_one" else 0.0)


@of_rewards
def mixed_standardized(
    rewards: torch.Tensor, group: torch.Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """ScaleRL's advantage (R_i - mean_g R) / (std + eps), where the std is over mixed groups.

    A mixed group is a group whose rewards are not all equal. Advantages are multiplied by (number
    of groups / number of mixed groups), which turns the loss's mean over all scored groups into a
    mean over the mixed groups.
    """
    mixed = ~zero_variance(rewards, group) & ~rewards.isnan()
    counted = group[~rewards.isnan()].unique()
    groups = len(counted) / max(1, len(group[mixed].unique()))
    among = rewards.where(mixed, torch.nan)
    return groups * batch_standardized(among, group, ddof=ddof, eps=eps, of="centered")


def length_weighted(batch: Batch) -> torch.Tensor:
    """The reward minus its group's length-weighted mean reward (OPO, arXiv 2505.23585)."""
    lengths = batch.mask.sum(dim=1)
    return per_token(against_baseline(rollout_rewards(batch), batch.group, lengths), batch.mask)


@of_rewards
def scaled_up(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The advantage of GPG: the centered reward R_i - mean_g R, times a factor alpha."""
    scored = ~rewards.isnan()
    useful = scored & ~zero_variance(rewards, group)
    return centered(rewards, group) * scored.sum() / useful.sum().clamp(min=1)


def group_whitened(
    batch: Batch, *, weighting: Literal["sequence", "token"] = "sequence", eps: float = 1e-8
) -> torch.Tensor:
    """C_i / (std C + eps) with C_i = R_i - mean_g R, and with the std over the batch."""
    if weighting == "sequence":
        return standardized_by_batch(batch, ddof=1, eps=eps, of="centered")
    advantage = group_centered(batch)
    return whitened(advantage, scored_tokens(batch), eps=eps)


def returns_whitened(batch: Batch, *, gamma: float = 1.0, eps: float = 1e-8) -> torch.Tensor:
    """Discounted returns U_t = sum_{u>=t} gamma^(u-t) r_u, whitened over all tokens."""
    mask = scored_tokens(batch)
    return whitened(returns(token_rewards(batch), mask, gamma=gamma), mask, eps=eps)


def token_rewards(batch: Batch) -> torch.Tensor:
    """Return token rewards [B, T]: the reward at the last token, minus each token's KL penalty."""
    later = batch.mask.flip(1).cumsum(dim=1).flip(1)
    rewards = batch.rewards[:, None].expand_as(batch.mask).where(batch.mask & (later == 1), 0.0)
    return rewards if batch.token_penalty is None else rewards - batch.token_penalty.double()


def returns(rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return the discounted return [B, T] of each token; tokens outside the mask get 0."""
    total = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, t], rewards[:, t] + gamma * ahead, ahead)
        total[:, t] = ahead
    return total.where(mask, 0.0)


@of_rewards
def best_of_group(
    rewards: torch.Tensor, group: torch.Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """Advantages for pass@k training: all completions except the best of a group get 0.

    arXiv 2503.19595. The best completion's advantage is (R_(1) - R_(2)) / (std_g R + eps), where
    R_(1) and R_(2) are the two highest rewards of the group. If several completions share the
    highest reward, all advantages of the group are 0.
    """
    scale = standardized(rewards, group, ddof=ddof, eps=eps)
    advantage = torch.zeros_like(scale)
    for rows in rows_of_groups(group, ~rewards.isnan()):
        if len(rows) > 1:
            best, second = scale[rows].topk(2).values
            advantage[rows[scale[rows].argmax()]] = best - second
    return advantage


def _divided(difference: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return difference / spread.where(spread > 0, 1.0)  # with eps 0 and equal rewards, spread is 0


def kept_standardized(
    batch: Batch, *, keep: int = 4, metric: Metric = "length", ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """Rewards standardized over the `keep` best completions of a group; 0 for other completions."""
    rewards = rollout_rewards(batch)
    kept = kept_rows(rewards, batch.mask.sum(dim=1), batch.group, keep=keep, metric=metric)
    chosen = rewards.where(kept, torch.nan)
    return per_token(standardized(chosen, batch.group, ddof=ddof, eps=eps), batch.mask)


def kept_rows(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group: torch.Tensor,
    *,
    keep: int,
    metric: Metric = "length",
) -> torch.Tensor:
    """Return a mask [B] of the `keep` best completions of each group.

    The best completions are the shortest completions (`metric = "length"`), or the completions with
    the most reward per token (`metric = "rate"`). Among equally good completions, the shorter
    completion is kept. Among equally short completions, the earlier completion is kept. A
    completion that could not be scored is never kept.
    """
    scored = ~rewards.isnan()
    if metric == "rate" and bool((rewards[scored] < 0).any()):
        raise ConfigError(
            "gfpo: metric = 'rate' needs rewards of at least 0, because with negative rewards "
            "gfpo would keep the longest failed completions"
        )
    best = lengths.double()
    if metric == "rate":
        best = -(rewards.double() / lengths.clamp(min=1))
    kept = torch.zeros_like(scored)
    for rows in rows_of_groups(group, scored):
        by_length = rows[lengths[rows].argsort(stable=True)]
        kept[by_length[best[by_length].argsort(stable=True)][:keep]] = True
    return kept


# PKPO, arXiv 2505.15201: advantages for max@k, the best reward of k completions (pass@k if binary).
#
# The formulas use the n scored rewards g_1 to g_n of a group in ascending order, g_1 <= ... <= g_n:
#
#     rho_k(g) = 1/C(n,k) sum_{i>=k} C(i-1,k-1) g_i          the unbiased estimate of max@k
#     s_i      = 1/C(n,k) [ C(i-1,k-1) g_i + sum_{j>i} C(j-2,k-2) g_j ]
#
# To get s_i, take all k-subsets that contain completion i, average the maximum rewards of these
# subsets, and multiply by k/n.


@of_rewards
def best_of_k(
    rewards: torch.Tensor, group: torch.Tensor, *, k: int = 4, baseline: Baseline = "loo1"
) -> torch.Tensor:
    """PKPO's advantage, with which the policy gradient is an unbiased one of max@k's gradient."""
    advantage = torch.zeros_like(rewards, dtype=torch.float64)
    for rows in rows_of_groups(group, ~rewards.isnan() & ~zero_variance(rewards, group)):
        if len(rows) > 1:
            advantage[rows] = len(rows) * subset_gains(rewards[rows], k=k, baseline=baseline)
    return advantage


def subset_gains(rewards: torch.Tensor, *, k: int, baseline: Baseline) -> torch.Tensor:
    """Return the gain s_i - baseline_i [n] of each completion, given the rewards [n] of one group.

        loo1     k/n rho_{k-1} without i: the gain of i over subsets of k - 1 others; never negative
        centred  k/n rho_k without i: results add up to 0; with k = 1 the result is RLOO / n
        loo      k/(n-1) rho_k without i, the paper's equation 29

    Every baseline gives an unbiased gradient. With k = 1, the baseline `loo1` is replaced by
    `centred`. If scoring failed for some completions of a group, k is lowered to the largest value
    that the baseline allows for the scored completions.
    """
    n = len(rewards)
    if baseline == "loo1" and k == 1:
        baseline = "centred"
    k = min(k, n if baseline == "loo1" else n - 1)
    order = rewards.double().argsort(stable=True)
    values = rewards.double()[order]
    without = [torch.cat((values[:i], values[i + 1 :])) for i in range(n)]
    if baseline == "loo1":
        base = [k / n * best_of(rest, k - 1) for rest in without]
    else:
        base = [k / (n if baseline == "centred" else n - 1) * best_of(rest, k) for rest in without]
    own = values * _coefficients(values, lambda i: comb(i - 1, k - 1))
    later = values * _coefficients(values, lambda j: comb(j - 2, k - 2) if min(j, k) >= 2 else 0)
    above = later.flip(0).cumsum(0).flip(0) - later
    gains = torch.empty_like(values)
    gains[order] = (own + above) / comb(n, k) - torch.stack(base)
    return gains


def best_of(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return rho_k: the maximum of k of the ascending `values` [n], averaged over all k-subsets."""
    return (values * _coefficients(values, lambda i: comb(i - 1, k - 1))).sum() / comb(
        len(values), k
    )


def _coefficients(values: torch.Tensor, of: Callable[[int], int]) -> torch.Tensor:
    """Return the values `of(1)`, ..., `of(n)` as a float64 tensor."""
    counts = [float(of(rank)) for rank in range(1, len(values) + 1)]
    return torch.tensor(counts, dtype=torch.float64, device=values.device)


ADVANTAGES: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "none": reward_itself,
        "centered": group_centered,
        "standardized": group_standardized,
        "batch_standardized": standardized_by_batch,
        "leave_one_out": against_the_others,
        "length_weighted": length_weighted,
        "scaled_up": scaled_up,
        "group_whitened": group_whitened,
        "returns_whitened": returns_whitened,
        "best_of_group": best_of_group,
        "parts_standardized": parts_standardized,
        "divided_by_mean": divided_by_mean,
        "mixed_standardized": mixed_standardized,
        "best_of_k": best_of_k,
        "kept_standardized": kept_standardized,
    }
)
