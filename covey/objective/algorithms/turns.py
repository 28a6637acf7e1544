"""Algorithms with advantages of single turns."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import surrogate, turns, weights
from covey.objective.loss import Objective
from covey.objective.penalty import PENALTIES, Kl
from covey.objective.ratio import token


def gigpo(
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize: Literal["std", "mean"] = "std",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Group-in-Group Policy Optimization, arXiv 2505.10978: turns in equal states are compared too.

        A_E  = (R_i - mean_g R) / (std_g R + eps)
        U_k  = sum_{j>=k} gamma^(j-k) r_j,  the last turn earns what turn rewards leave of R
        A_S  = (U_k - mean U) / (std U + eps)  over the turns of the group in the same state
        A    = A_E + step_weight A_S
        loss = - 1/N sum_i 1/T_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Worth knowing: for multi-turn rollouts, whose environment says which states are equal. A state
    that one turn alone was in adds nothing, so without repeated states it is GRPO. With
    `normalize = "mean"` neither term is divided by its deviation. Statistics of episodes are over
    rollouts; the released code takes them over turns, where long episodes weigh more.
    """
    return Objective(
        advantage=partial(
            turns.by_state,
            gamma=gamma,
            step_weight=step_weight,
            normalize=normalize,
            ddof=ddof,
            eps=eps,
        ),
        ratio=token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )
