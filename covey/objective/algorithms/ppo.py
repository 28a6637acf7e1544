"""PPO: advantages and targets from a critic's values (GAE), and the critic's loss.

    delta_t = r_t + gamma V_{t+1} - V_t      A_t = delta_t + gamma lam A_{t+1}      U_t = A_t + V_t

The token reward r_t is the rollout's reward at the last trained token, and 0 at other tokens. If
the KL penalty is part of the reward, each token's KL penalty is subtracted from r_t. The value V
after the last trained token is 0, even if the completion was truncated. Tokens outside the mask are
skipped. In tensor shapes, B is the number of rollouts, with one row per rollout, and T is the
number of tokens. The mask is a bool tensor [B, T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from covey.objective import surrogate, weights
from covey.objective.advantage import token_rewards, whitened
from covey.objective.loss import Objective, ValueLoss
from covey.objective.masked import row_tokens
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl
from covey.types import Batch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float | torch.Tensor = 0.95,
) -> torch.Tensor:
    """Return generalized advantage estimates [B, T], arXiv 1506.02438; `lam` may be per row [B]."""
    result = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        result[:, t] = here.where(mask[:, t], 0.0)
        next_advantage = torch.where(mask[:, t], here, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return result


def over_values(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    alpha: float = 0.0,
    whiten: bool = True,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Generalized advantage estimates from the critic's values, whitened over the step's tokens.

    PPO, arXiv 1707.06347. With `alpha` above 0, a completion of T_i tokens has lam = max(0, 1 - 1 /
    (alpha T_i)), as in VAPO (arXiv 2504.05118). The lambda of a longer completion is larger.
    """
    each = length_lambda(batch.mask, alpha) if alpha else lam
    estimates = gae(token_rewards(batch), _values(batch), batch.mask, gamma=gamma, lam=each)
    return whitened(estimates, batch.mask, eps=eps) if whiten else estimates


def value_targets(batch: Batch, *, gamma: float = 1.0, value_lam: float = 1.0) -> torch.Tensor:
    """The critic's targets A_t + V_t, where A_t is computed with the lambda `value_lam`."""
    values = _values(batch)
    estimates = gae(token_rewards(batch), values, batch.mask, gamma=gamma, lam=value_lam)
    return (estimates + values).where(batch.mask, 0.0)


def length_lambda(mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return each completion's lambda [B]: max(0, 1 - 1 / (alpha T_i)) for T_i tokens."""
    tokens = row_tokens(mask).squeeze(1).double()
    return (1 - 1 / (alpha * tokens)).clamp(min=0.0)


def _values(batch: Batch) -> torch.Tensor:
    assert batch.values is not None, "this objective needs a critic's values"
    return batch.values.double().where(batch.mask, 0.0)


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    targets: torch.Tensor,
    *,
    value_clip: float = 0.2,
) -> ValueLoss:
    """Return 1/2 max((V - U)^2, (clip(V) - U)^2) for the values V and targets U of all tokens."""
    plain = (values - targets).square()
    if not value_clip:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    held = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped = (held - targets).square()
    return ValueLoss(torch.maximum(plain, clipped) / 2, (clipped > plain) & (held != values))


def explained_variance(values: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the explained variance 1 - Var(U - V) / Var U of the targets U by the values V.

    The explained variance is 1 for a perfect critic, 0 for a critic that always predicts the mean,
    and NaN if all targets are equal.
    """
    chosen, wanted = values[mask].double(), targets[mask].double()
    if len(wanted) < 2 or not float(wanted.var()):
        return float("nan")
    return 1.0 - float((wanted - chosen).var() / wanted.var())


@algorithm(title="Proximal Policy Optimization with a critic", source="arXiv 1707.06347")
def ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0, gamma: float = 1.0,
    lam: float = 0.95, alpha: float = 0.0, whiten: bool = True, value_lam: float = 1.0,
    value_clip: float = 0.2, beta: float = 0.05, kl: Kl = "k1",
    kl_in: Literal["loss", "reward"] = "reward", eps: float = 1e-8,
) -> Objective:  # fmt: skip
    """
        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   A whitened
        loss    = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)
        critic  = 1/T sum_i sum_t 1/2 max((V - U)^2, (clip(V, V_old +- value_clip) - U)^2)

    The reward r_t of token t is -beta (old_logp - ref_logp)_t, plus the rollout's reward at the
    last trained token. V_t is the critic's value before token t, computed at the start of the
    training step. After the last token of a completion, the value V is 0, even if the completion
    was truncated. The critic's target is U = A + V, where A is not whitened and is computed with
    `value_lam` instead of `lam`. The critic is a separate model with its own optimizer, set in the
    configuration section [critic].

    PPO does not compare the completions of a group, so a prompt may have any number of completions.

    Choices: the default of `value_lam` is 1, so the critic's targets are the returns, as in VC-PPO
    (arXiv 2503.01491). TRL and verl use `lam` for both the advantages and the targets. The KL
    penalty is part of the reward, as usual in RLHF, and is estimated with k1. A completion that
    could not be scored is left out of every loss, and its tokens do not count in any denominator.

    Worth knowing: with `lam = 1` and without whitening, the advantage equals the reward if the
    critic always predicts 0. With `lam = 1` and a critic that always predicts the group's mean
    reward, the advantage equals the advantage of Dr.GRPO.
    """
    return Objective(
        advantage=partial(over_values, gamma=gamma, lam=lam, alpha=alpha, whiten=whiten, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        kl_in=kl_in,
        targets=partial(value_targets, gamma=gamma, value_lam=value_lam),
        value_loss=partial(clipped_value_loss, value_clip=value_clip),
        reads=frozenset({"values"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "ppo": ppo,
}
