"""Algorithms that clip the ratio of each token, and differ in advantage and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, surrogate, weights
from covey.objective.correction import CORRECTIONS
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(title="Group Relative Policy Optimization", source="arXiv 2402.03300")
def grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0, beta: float = 0.04,
    kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/N sum_i 1/T_i sum_t [ min(r A, clip(r, 1-clip_low, 1+clip_high) A) - beta k3 ]
        r    = exp(logp - old_logp),  k3 = exp(-d) - 1 + d,  d = logp - ref_logp

    Choices: the paper does not specify ddof, eps or the clip range. The defaults are ddof 1, eps
    1e-6 and a clip range of 0.2.

    Departure: if all rewards of a group are equal, the advantages of the group are exactly 0. The
    paper's formula would divide the rounding error of the group's mean by eps. For example, the
    paper's formula would give an advantage of 0.7 for six float32 rewards of 0.3 with eps 1e-8.

    Worth knowing: with beta 0, as in many recent recipes, Covey loads no reference model. A k3
    penalty in the loss has the gradient of the forward KL, KL(reference, policy). A k2 penalty in
    the loss (`kl = "k2"`) has the gradient of the reverse KL, KL(policy, reference). With one
    optimizer step per rollout batch, every ratio is 1 and the clip has no effect.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="GRPO Done Right", source="arXiv 2503.20783")
def dr_grpo(
    *, length: int, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0,
    beta: float = 0.0, kl: Kl = "k3",
) -> Objective:  # fmt: skip
    """
        A_i  = R_i - mean_g R
        loss = - 1/(N length) sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    `length` is a constant: the maximum number of tokens that a completion may have. In a training
    run, `length` defaults to rollout.max_tokens. A call of `dr_grpo` from Python must pass
    `length`. Some libraries divide by the padded width of the batch, which changes from batch to
    batch.

    Worth knowing: in other libraries, Dr.GRPO often still divides by the standard deviation or by
    the completion's length. In TRL, Dr.GRPO divides by the standard deviation if only loss_type is
    set. Covey's `dr_grpo` divides neither by the standard deviation nor by the completion's length.
    """
    return Objective(
        advantage=advantage.group_centered,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=partial(weights.sequence_mean_token_sum_norm, length=length),
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(
    title="Decoupled Clip and Dynamic Sampling Policy Optimization",
    source="arXiv 2503.14476",
)
def dapo(
    *, clip_low: float = 0.2, clip_high: float = 0.28, dual: float = 0.0,
    aggregation: Literal["token_mean", "group_mean_token_mean"] = "token_mean", beta: float = 0.0,
    kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A),  clip_low < clip_high

    `dapo` is only the loss of DAPO, with its clip range and its mean over tokens. The other parts
    of DAPO are separate settings for any algorithm: dynamic sampling (`filter.dynamic_sampling`),
    overlong filtering (`filter.mask_truncated`) and soft overlong punishment (`length_penalty.name
    = "soft"`).

    Choice: the loss is a mean over all tokens of the optimizer step, as in the authors' released
    code. Equation 8 of the paper first averages over the tokens of each group (`aggregation =
    "group_mean_token_mean"`).
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.WEIGHTS[aggregation],
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Lite PPO", source="arXiv 2508.08221")
def lite_ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Group mean as baseline, standard deviation over the batch.

        A_i  = (R_i - mean_g R) / (std_batch R + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The standard deviation is over all completions of a training step, even if the training step has
    several optimizer steps.
    """
    return Objective(
        advantage=partial(advantage.standardized_by_batch, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="On-Policy RL with Optimal Reward Baseline", source="arXiv 2505.23585")
def opo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3"
) -> Objective:
    """
        A_i  = R_i - sum_g T R / sum_g T
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    The baseline is the mean reward of a group, weighted by completion length, so every token counts
    equally. OPO's baseline minimizes the variance of the gradient if the squared norm of a
    completion's gradient is proportional to the completion's length.

    Departure: the paper takes one optimizer step per batch, so a clip range would have no effect.
    Covey's `opo` has a clip for runs with several optimizer steps per batch.
    """
    return Objective(
        advantage=advantage.length_weighted,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="REINFORCE++", source="arXiv 2501.03262")
def reinforce_pp(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.01, kl: Kl = "k1",
    kl_in: Literal["loss", "reward"] = "reward", gamma: float = 1.0, eps: float = 1e-8,
) -> Objective:  # fmt: skip
    """The baseline is the mean of the batch, not of the group.

        r_t  = -beta k1_t, and + R_i at the last token;  U_t = sum_{u>=t} gamma^(u-t) r_u
        A    = (U - mean U) / sqrt(var U + eps), over all tokens of the batch
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Because the baseline is the mean of the batch, `reinforce_pp` reinforces most completions of an
    easy prompt, but few completions of a hard prompt. `reinforce_pp_baseline` subtracts the mean of
    each group instead.
    """
    return Objective(
        advantage=partial(advantage.returns_whitened, gamma=gamma, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        kl_in=kl_in,
        reads=frozenset(),
    )


@algorithm(title="REINFORCE++ with the group's mean as baseline", source="arXiv 2501.03262")
def reinforce_pp_baseline(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k2",
    weighting: Literal['sequence', 'token'] = "sequence", eps: float = 1e-8,
) -> Objective:  # fmt: skip
    """
        C_i  = R_i - mean_g R;   A_i = C_i / (std_batch C + eps)
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Libraries disagree on the standard deviation: verl and OpenRLHF compute it over tokens, and
    ms-swift over completions. Covey computes the standard deviation over completions, because the
    mean of the centred rewards C over completions is always 0. With `weighting = "token"`, Covey
    computes the standard deviation over tokens. The KL estimator in the loss is k2, as the paper
    recommends.
    """
    return Objective(
        advantage=partial(advantage.group_whitened, weighting=weighting, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Decoupled PPO", source="arXiv 2110.00641; AReaL, arXiv 2505.24298")
def decoupled_ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0, cap: float = 5.0,
    beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Corrects for stale tokens.

        loss = - 1/T sum_i sum_t w min(r A, clip(r, 1-clip_low, 1+clip_high) A)
        r    = exp(logp - old_logp),  w = exp(old_logp - sampler_logp), and 0 where w > cap

    The behaviour policy of a token is the version of the policy that sampled the token. The
    proximal policy is the trainer's policy at the start of the batch, and is the same for every
    token. The clip range is centred on the proximal policy, and the importance weight w corrects
    for tokens that an older policy sampled. With one optimizer step per batch, the ratio r is 1,
    and only the importance weight w has an effect.

    Choice: tokens whose importance weight exceeds `cap` are dropped, as in AReaL's paper. AReaL's
    code no longer uses the importance weight by default. For another off-policy correction, set the
    option `objective.correction`, which takes the place of w. Covey's default correction for stale
    rollouts is not added to w.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high, dual=dual),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        correction=partial(CORRECTIONS["token_mask"], low=0.0, high=cap),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "lite_ppo": lite_ppo,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "decoupled_ppo": decoupled_ppo,
}
