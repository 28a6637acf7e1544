"""Related methods, for comparison in your own loop: PPO with a critic, and DPO.

Covey trains with neither: PPO needs a value head, and DPO needs preference pairs instead of groups.
Shapes: B completions, T tokens, mask [B, T] bool.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from covey.objective.masked import difference, row_sum


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> torch.Tensor:
    """Generalized advantage estimates [B, T], arXiv 1506.02438.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    V after the last trained token is 0. Tokens outside the mask are skipped. The targets of the
    critic are A + V.
    """
    result = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        result[:, t] = here.where(mask[:, t], 0.0)
        next_advantage = torch.where(mask[:, t], here, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return result


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float,
) -> torch.Tensor:
    """1/2 max((V - U)^2, (clip(V, V_old - c, V_old + c) - U)^2), the mean over tokens."""
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    worse = torch.maximum((values - targets).square(), (held - targets).square())
    return worse.where(mask, 0.0).sum() / (2 * mask.sum().clamp(min=1))


def preference_loss(
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    form: Literal["dpo", "ipo"] = "dpo",
) -> torch.Tensor:
    """DPO (arXiv 2305.18290) or IPO (2310.12036), the mean over pairs of rows.

        delta = sum_t (logp - ref_logp)[chosen] - sum_t (logp - ref_logp)[rejected]
        dpo: -log sigmoid(beta delta)        ipo: (delta - 1 / (2 beta))^2

    Both sum over tokens, as the papers do.
    """
    gain = row_sum(difference(logp, ref_logp, mask), mask).squeeze(1)
    delta = gain[chosen] - gain[rejected]
    if form == "dpo":
        return -logsigmoid(beta * delta).mean()
    return (delta - 1 / (2 * beta)).square().mean()
