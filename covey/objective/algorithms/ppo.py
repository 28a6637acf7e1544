"""Algorithms with a critic, a model that is trained to predict the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import critic, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


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
        advantage=partial(
            critic.over_values, gamma=gamma, lam=lam, alpha=alpha, whiten=whiten, eps=eps
        ),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        kl_in=kl_in,
        targets=partial(critic.value_targets, gamma=gamma, value_lam=value_lam),
        value_loss=partial(critic.clipped_value_loss, value_clip=value_clip),
        reads=frozenset({"values"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "ppo": ppo,
}
