"""Algorithms that compute an advantage for each turn."""

from __future__ import annotations

from covey.objective import ratio, surrogate, turns, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective


@takes(
    "gamma", "step_weight", "normalize", "clip_low", "clip_high", "beta", "kl", "ddof", "eps"
)  # fmt: skip
def gigpo() -> Objective:
    """Group-in-Group Policy Optimization, arXiv 2505.10978: also compares turns in equal states.

        A_E  = (R_i - mean_g R) / (std_g R + eps)
        U_k  = sum_{j>=k} gamma^(j-k) r_j,  r_last includes R minus the sum of turn rewards
        A_S  = (U_k - mean U) / (std U + eps)  over the turns of the group in the same state
        A    = A_E + step_weight A_S
        loss = - 1/N sum_i 1/T_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Worth knowing: `gigpo` is for multi-turn rollouts with an environment that reports its states. A
    state that occurs only once does not change the advantage, so `gigpo` equals GRPO if no state
    occurs twice. With `normalize = "mean"`, advantages are not divided by a standard deviation. To
    compute the episode advantage A_E, Covey takes the mean and standard deviation over the rollouts
    of a group. The authors' code computes the mean and standard deviation of A_E over turns, so
    long episodes count more.
    """
    return Objective(
        advantage=turns.by_state,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.sequence_mean_token_mean,
    )
