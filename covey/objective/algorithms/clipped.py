"""Algorithms that clip the ratio of each token, and differ in advantage and aggregation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import advantage, ratio, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.penalty import PENALTIES, Kl


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float = 0.0,
    beta: float = 0.04,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Group Relative Policy Optimization, arXiv 2402.03300.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/N sum_i 1/T_i sum_t [ min(r A, clip(r, 1-clip_low, 1+clip_high) A) - beta k3 ]
        r    = exp(logp - old_logp),  k3 = exp(-d) - 1 + d,  d = logp - ref_logp

    Where the paper is silent: ddof 1, eps 1e-6, clip 0.2.

    Departure: a group whose rewards are all equal has advantage exactly 0. Without that guard the
    rounding error of the mean is divided by eps: six float32 rewards of 0.3 and eps 1e-8 give 0.7.

    Worth knowing: k3 in the loss has the gradient of KL(reference, policy), the other direction;
    `kl = "k2"` has the right one. With beta 0, which most users want today, no reference model is
    loaded. With one optimizer step per rollout batch the ratio is 1 and the clip never acts.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def dr_grpo(
    *,
    length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float = 0.0,
    beta: float = 0.0,
    kl: Kl = "k3",
) -> Objective:
    """GRPO Done Right, arXiv 2503.20783.

        A_i  = R_i - mean_g R
        loss = - 1/(N length) sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    `length` is a constant, the generation budget. In a run it is rollout.max_tokens unless given;
    elsewhere it must be given, because the padded width of a batch, which some codes take, changes
    from batch to batch.

    Worth knowing: what other codes call dr_grpo often keeps the division by the standard deviation
    (TRL's loss_type alone) or by the answer's own length; neither is this algorithm.
    """
    return Objective(
        advantage=advantage.group_centered,
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=partial(weights.sequence_mean_token_sum_norm, length=length),
        penalty=PENALTIES[kl],
        beta=beta,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual: float = 0.0,
    aggregation: Literal["token_mean", "group_mean_token_mean"] = "token_mean",
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Decoupled Clip and Dynamic Sampling Policy Optimization, arXiv 2503.14476.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A),  clip_low < clip_high

    The clip and the aggregation are here; the rest of DAPO is not a loss and combines with any
    algorithm: dynamic sampling (filter.dynamic_sampling), overlong filtering
    (filter.mask_truncated) and soft overlong punishment (length_penalty.name = "soft").

    Where paper and released code differ: equation 8 takes the token mean inside each prompt's group
    (`aggregation = "group_mean_token_mean"`), the code, like ours, over the optimizer step.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.WEIGHTS[aggregation],
        penalty=PENALTIES[kl],
        beta=beta,
    )


def lite_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Lite PPO, arXiv 2508.08221: the mean of the group, the deviation of the batch.

        A_i  = (R_i - mean_g R) / (std_batch R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The batch is all answers of a step, whatever number of optimizer steps it is split into.
    """
    return Objective(
        advantage=partial(advantage.standardized_by_batch, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def opo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3"
) -> Objective:
    """On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

        A_i  = R_i - sum_g T R / sum_g T
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The baseline weighs answers by their length, which minimises the variance if the gradient of an
    answer grows with its length; so every token has the same weight here.

    Departure: the paper takes one optimizer step per batch, where the clip never acts. It is here
    for those who take more.
    """
    return Objective(
        advantage=advantage.length_weighted,
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def reinforce_pp(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.01,
    kl: Kl = "k1",
    kl_in: Literal["loss", "reward"] = "reward",
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> Objective:
    """REINFORCE++, arXiv 2501.03262: no group at all.

        r_t  = -beta k1_t, and + R_i at the last token;  U_t = sum_{u>=t} gamma^(u-t) r_u
        A    = (U - mean U) / sqrt(var U + eps), over all tokens of the batch
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Since the baseline is that of the batch, prompts of different difficulty are pushed as wholes;
    `reinforce_pp_baseline` mends that.
    """
    return Objective(
        advantage=partial(advantage.returns_whitened, gamma=gamma, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        kl_in=kl_in,
        reads=frozenset(),
    )


def reinforce_pp_baseline(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    kl: Kl = "k2",
    weighting: Literal["answer", "token"] = "answer",
    eps: float = 1e-8,
) -> Objective:
    """REINFORCE++ with the group's mean as baseline, arXiv 2501.03262.

        C_i  = R_i - mean_g R;   A_i = C_i / (std_batch C + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Codes disagree on the deviation: over tokens in verl and OpenRLHF, over answers in ms-swift.
    We take answers, where the mean of C stays 0 and length does not come in; `weighting = "token"`
    is the other reading. A KL in the loss is k2, as the paper recommends.
    """
    return Objective(
        advantage=partial(advantage.group_whitened, weighting=weighting, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )
