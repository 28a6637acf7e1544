"""Advantages: how much better an answer was than its group.

Shapes: B rollouts, T completion tokens. Rewards and statistics are float64, because a float32 mean
of equal rewards is not equal to them, and a standard deviation of 3e-8 then turns rounding into an
advantage of order one.

Every function takes the rewards of a whole rollout batch with group ids, in any order: statistics
may be of the group or of the batch, and nothing is ever reshaped by the group size. A NaN reward
means that scoring failed: the row enters no statistic and its advantage is 0.
"""

from __future__ import annotations

import torch

EQUAL_REWARDS = 1e-8
"""Rewards of a group that differ by less, relative to the largest in size, count as equal."""


def group_sum(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sum values [B] within each group and hand every row its group's sum, [B]."""
    _, index = group.unique(return_inverse=True)
    sums = values.new_zeros(int(index.max()) + 1 if index.numel() else 0)
    return sums.index_add(0, index, values)[index]


def zero_variance(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Mark the rows [B] whose group has no reward that differs from another: nothing to learn."""
    rewards = rewards.double()
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0

    def extreme(values: torch.Tensor, reduce: str, start: float) -> torch.Tensor:
        seed = values.new_full((groups,), start)
        return seed.scatter_reduce(0, index, values, reduce)[index]

    scored = ~rewards.isnan()
    largest = extreme(rewards.where(scored, -torch.inf), "amax", -torch.inf)
    smallest = extreme(rewards.where(scored, torch.inf), "amin", torch.inf)
    size = torch.maximum(largest.abs(), smallest.abs()).clamp(min=1.0)
    return ~(largest - smallest > EQUAL_REWARDS * size)


def centered(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """A_i = R_i - mean_g R, and exactly 0 in a group without variance.

    The numerator that every group-relative method shares; Dr.GRPO (arXiv 2503.20783) uses it alone.
    """
    rewards = rewards.double()
    scored = ~rewards.isnan()
    values = rewards.where(scored, 0.0)
    count = group_sum(scored.double(), group).clamp(min=1.0)
    difference = values - group_sum(values, group) / count
    return difference.where(scored & ~zero_variance(rewards, group), 0.0)


def standardized(
    rewards: torch.Tensor, group: torch.Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """A_i = (R_i - mean_g R) / (std_g R + eps), and exactly 0 in a group without variance.

    GRPO, arXiv 2402.03300 section 4.1.2, which leaves ddof and eps open. Public code uses ddof 0 or
    1 and eps from 1e-9 to 1e-4; ddof 0 multiplies every advantage by sqrt(G / (G - 1)).
    """
    difference = centered(rewards, group)
    scored = (~rewards.isnan()).double()
    count = group_sum(scored, group)
    variance = group_sum(difference.square(), group) / (count - ddof).clamp(min=1.0)
    spread = variance.sqrt() + eps
    return difference / spread.where(spread > 0, 1.0)  # eps may be 0, and a group all equal


def per_token(advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every trained token the advantage [B] of its answer: [B, T], 0 elsewhere."""
    return advantage[:, None].expand_as(mask).where(mask, 0.0)
