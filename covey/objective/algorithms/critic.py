"""Algorithms with a critic: a model that is trained to expect the reward."""

from __future__ import annotations

from covey.objective import critic, ratio, surrogate, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective
from covey.objective.penalty import k1


@takes(
    "clip_low", "clip_high", "dual", "gamma", "lam", "alpha", "whiten", "value_lam", "value_clip",
    "beta", "kl", "kl_in", "eps",
)  # fmt: skip
def ppo() -> Objective:
    """Proximal Policy Optimization with a critic, arXiv 1707.06347.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   A whitened
        loss    = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)
        critic  = 1/T sum_i sum_t 1/2 max((V - U)^2, (clip(V, V_old +- value_clip) - U)^2)

    r_t is -beta (old_logp - ref_logp)_t, plus the reward at the last trained token. V is what the
    critic expected before token t, at the start of the step; after the last token it is 0. U is A +
    V with `value_lam` in the place of lam, before whitening. The critic is a model of its own, with
    an optimizer of its own: the section [critic].

    Groups are not compared: any number of completions of a prompt will do.

    Choices: value_lam 1, the returns themselves, as in VC-PPO (arXiv 2503.01491); TRL and verl take
    lam for both. The KL is k1 in the reward, as in RLHF. A completion that was cut off ends with
    the value 0 too. One that could not be scored is in neither loss, nor in any denominator.

    Worth knowing: with V = 0, lam 1 and no whitening A is the reward; with V the mean of the group
    it is Dr.GRPO's.
    """
    return Objective(
        advantage=critic.over_values,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.token_mean,
        targets=critic.value_targets,
        value_loss=critic.clipped_value_loss,
        penalty=k1,
        beta=0.05,
        kl_in="reward",
        reads=critic.READS,
    )
