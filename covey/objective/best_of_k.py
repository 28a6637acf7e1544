"""PKPO's advantages for max@k, the best reward of k completions (pass@k if binary).

The formulas of arXiv 2505.15201 use the n scored rewards g_1 to g_n of a group in ascending order,
g_1 <= ... <= g_n:

    rho_k(g) = 1/C(n,k) sum_{i>=k} C(i-1,k-1) g_i          the unbiased estimate of max@k
    s_i      = 1/C(n,k) [ C(i-1,k-1) g_i + sum_{j>i} C(j-2,k-2) g_j ]

To get s_i, take all k-subsets that contain completion i, average the maximum rewards of these
subsets, and multiply by k/n.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Literal

import torch

from covey.objective.advantage import per_token, rollout_rewards, zero_variance
from covey.types import Batch

Baseline = Literal["loo1", "loo", "centred"]


def best_of_k(batch: Batch, *, k: int = 4, baseline: Baseline = "loo1") -> torch.Tensor:
    """The advantage n (s_i - baseline) of each completion, which gives the gradient of max@k.

    PKPO, arXiv 2505.15201.
    """
    rewards = rollout_rewards(batch)
    advantage = torch.zeros_like(rewards, dtype=torch.float64)
    flat = zero_variance(rewards, batch.group)
    for group in batch.group.unique():
        scored = ((batch.group == group) & ~rewards.isnan() & ~flat).nonzero().squeeze(1)
        if len(scored) > 1:
            gains = subset_gains(rewards[scored], k=k, baseline=baseline)
            advantage[scored] = len(scored) * gains
    return per_token(advantage, batch.mask)


def subset_gains(rewards: torch.Tensor, *, k: int, baseline: Baseline) -> torch.Tensor:
    """Return s_i - baseline_i [n] for the rewards [n] of one group, in the same order.

        loo1     k/n rho_{k-1} without i: the gain of i over subsets of k - 1 others; never negative
        centred  k/n rho_k without i: results add up to 0; with k = 1 the result is RLOO / n
        loo      k/(n-1) rho_k without i, the paper's equation 29

    Each baseline gives an unbiased gradient. If scoring failed for some completions of a group, k
    is lowered to the largest value that the baseline allows for the scored completions. With k = 1,
    the baseline `loo1` equals `centred`.
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
    gains = torch.empty_like(values)
    gains[order] = _shares(values, k) - torch.stack(base)
    return gains


def best_of(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return rho_k, the mean of the maxima of all k-subsets; `values` [n] must ascend."""
    return (values * _coefficients(values, lambda i: comb(i - 1, k - 1))).sum() / comb(
        len(values), k
    )


def _shares(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the value s_i of each completion, given the rewards [n] in ascending order."""
    own = values * _coefficients(values, lambda i: comb(i - 1, k - 1))
    later = values * _coefficients(values, lambda j: comb(j - 2, k - 2) if min(j, k) >= 2 else 0)
    above = later.flip(0).cumsum(0).flip(0) - later
    return (own + above) / comb(len(values), k)


def _coefficients(values: torch.Tensor, of: Callable[[int], int]) -> torch.Tensor:
    """Return the values `of(1)`, ..., `of(n)` as a float64 tensor."""
    counts = [float(of(rank)) for rank in range(1, len(values) + 1)]
    return torch.tensor(counts, dtype=torch.float64, device=values.device)
