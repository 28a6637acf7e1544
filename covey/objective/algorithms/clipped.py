"""Algorithms that clip the ratio of each token; they differ in advantage and aggregation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import advantage, penalty, ratio, surrogate, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective


@takes("clip_low", "clip_high", "dual", "beta", "kl", "ddof", "eps")
def grpo() -> Objective:
    """Group Relative Policy Optimization, arXiv 2402.03300.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/N sum_i 1/T_i sum_t [ min(r A, clip(r, 1-clip_low, 1+clip_high) A) - beta k3 ]
        r    = exp(logp - old_logp),  k3 = exp(-d) - 1 + d,  d = logp - ref_logp

    Choices: ddof 1, eps 1e-6, clip 0.2; the paper does not specify them.

    Departure: a group whose rewards are all equal has advantage exactly 0. Otherwise the rounding
    error of the mean would be divided by eps: six float32 rewards of 0.3 with eps 1e-8 give an
    advantage of 0.7.

    Worth knowing: k3 in the loss has the gradient of KL(reference, policy), the forward KL.
    `kl = "k2"` has the gradient of KL(policy, reference), the reverse KL. With beta 0, which most
    users want today, no reference model is loaded. With one optimizer step per rollout batch the
    ratio is 1 and the clip has no effect.
    """
    return Objective(
        advantage=advantage.group_standardized,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.sequence_mean_token_mean,
        beta=0.04,
    )


@takes("length", "clip_low", "clip_high", "dual", "beta", "kl")
def dr_grpo() -> Objective:
    """GRPO Done Right, arXiv 2503.20783.

        A_i  = R_i - mean_g R
        loss = - 1/(N length) sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    `length` is a constant, the generation budget. In a run its default is rollout.max_tokens; in
    Python it must be given. Some libraries use the padded width of the batch instead, which changes
    from batch to batch.

    Worth knowing: in other libraries `dr_grpo` often keeps the division by the standard deviation
    (TRL, if only loss_type is set) or by the completion's own length. Neither is this algorithm.
    """
    return Objective(
        advantage=advantage.group_centered,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.WEIGHTS["sequence_mean_token_sum_norm"],  # which needs a length
    )


@takes("clip_low", "clip_high", "dual", "aggregation", "beta", "kl", "ddof", "eps")
def dapo(
    *, aggregation: Literal["token_mean", "group_mean_token_mean"] = "token_mean"
) -> Objective:
    """Decoupled Clip and Dynamic Sampling Policy Optimization, arXiv 2503.14476.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A),  clip_low < clip_high

    This is the loss of DAPO: its clip and its aggregation. The rest of DAPO is not a loss and
    combines with any algorithm: dynamic sampling (filter.dynamic_sampling), overlong filtering
    (filter.mask_truncated) and soft overlong punishment (length_penalty.name = "soft").

    Where paper and released code differ: equation 8 takes the token mean inside each prompt's group
    (`aggregation = "group_mean_token_mean"`). The released code, like ours, takes it over the
    optimizer step.
    """
    return Objective(
        advantage=advantage.group_standardized,
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_high=0.28),
        weights=weights.WEIGHTS[aggregation],
    )


@takes("clip_low", "clip_high", "beta", "kl", "ddof", "eps")
def lite_ppo() -> Objective:
    """Lite PPO, arXiv 2508.08221: the mean of the group, the standard deviation of the batch.

        A_i  = (R_i - mean_g R) / (std_batch R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The batch consists of all completions of a training step, however many optimizer steps it has.
    """
    return Objective(
        advantage=advantage.standardized_by_batch,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.token_mean,
    )


@takes("clip_low", "clip_high", "beta", "kl")
def opo() -> Objective:
    """On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

        A_i  = R_i - sum_g T R / sum_g T
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The baseline weights each completion by its length, so every token has the same weight. This
    minimises the variance if the squared norm of a completion's gradient grows with its length.

    Departure: the paper takes one optimizer step per batch, so that a clip would have no effect. We
    keep the clip for runs with several optimizer steps per batch.
    """
    return Objective(
        advantage=advantage.length_weighted,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.token_mean,
    )


@takes("clip_low", "clip_high", "beta", "kl", "kl_in", "gamma", "eps")
def reinforce_pp() -> Objective:
    """REINFORCE++, arXiv 2501.03262: the baseline is the mean of the batch, not of the group.

        r_t  = -beta k1_t, and + R_i at the last token;  U_t = sum_{u>=t} gamma^(u-t) r_u
        A    = (U - mean U) / sqrt(var U + eps), over all tokens of the batch
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Because the baseline is the mean of the batch, most completions of an easy prompt and few of a
    hard prompt are reinforced; `reinforce_pp_baseline` corrects that.
    """
    return Objective(
        advantage=advantage.returns_whitened,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.token_mean,
        penalty=penalty.k1,
        beta=0.01,
        kl_in="reward",
        reads=frozenset(),
    )


@takes("clip_low", "clip_high", "beta", "kl", "weighting", "eps")
def reinforce_pp_baseline() -> Objective:
    """REINFORCE++ with the group's mean as baseline, arXiv 2501.03262.

        C_i  = R_i - mean_g R;   A_i = C_i / (std_batch C + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Libraries disagree on the standard deviation: it is over tokens in verl and OpenRLHF, and over
    completions in ms-swift. We take it over completions, so that the mean of C stays 0 and does not
    depend on lengths; `weighting = "token"` takes it over tokens. A KL in the loss is k2, as the
    paper recommends.
    """
    return Objective(
        advantage=advantage.group_whitened,
        ratio=ratio.token,
        surrogate=surrogate.clipped,
        weights=weights.token_mean,
        penalty=penalty.k2,
    )
