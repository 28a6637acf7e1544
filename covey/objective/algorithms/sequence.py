"""Algorithms whose ratio or clip applies to whole completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, ratio, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(title="Group Sequence Policy Optimization", source="arXiv 2507.18071")
def gspo(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        A_i  = (R_i - mean_g R) / (std_g R + eps)
        s_i  = exp( 1/T_i sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(s A, clip(s, 1-clip_low, 1+clip_high) A)

    Worth knowing: the ratio s of a completion is a geometric mean of token ratios, so s changes far
    less than the ratio of a token. A clip range of 0.2 would have no effect on the ratio of a
    completion. With one optimizer step per rollout batch, s is 1 and the gradient equals the
    gradient of GRPO. GSPO's loss is a mean over completions. In several libraries, GSPO averages
    over tokens, which gives the loss of `luspo` times a constant.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="GSPO-token", source="arXiv 2507.18071 equations 13 to 18")
def gspo_token(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """A form of GSPO with a gradient per token.

        s_t  = sg(s_i) exp(logp - sg(logp)),  sg: no gradient
        loss = - 1/N sum_i 1/T_i sum_t min(s_t A, clip(s_t, 1-clip_low, 1+clip_high) A)

    If all tokens of a completion have the same advantage, `gspo_token` and `gspo` have the same
    loss and the same gradient. Use `gspo_token` if the tokens of a completion have different
    advantages, for example with the option `top_entropy`.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence_token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Length-Unbiased Sequence Policy Optimization", source="arXiv 2602.05261")
def luspo(
    *, clip_low: float = 2e-3, clip_high: float = 2.5e-3, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Length-weighted GSPO.

        loss = - 1/N sum_i T_i min(s A, clip(s, 1-clip_low, 1+clip_high) A)

    GSPO divides by the completion's length, which favours short correct completions. `luspo` does
    not divide by the completion's length.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_sum,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="Geometric-Mean Policy Optimization", source="arXiv 2507.20673")
def gmpo(
    *, clip_low: float = 0.4, clip_high: float = 0.4, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        z_t  = min(x, clip(x, -clip_low, clip_high)) if A > 0 else max(...),  x = logp - old_logp
        loss = - 1/N sum_i A_i exp( 1/T_i sum_t z_t )

    The clip bounds apply to the logarithm of the ratio. The default bounds of 0.4 allow ratios from
    exp(-0.4) = 0.67 to exp(0.4) = 1.49.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.geometric_clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="REINFORCE Leave-One-Out", source="arXiv 2402.14740")
def rloo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.05, kl: Kl = "k1",
    kl_in: Literal["loss", "reward"] = "reward",
) -> Objective:  # fmt: skip
    """
        R_i  := R_i - beta sum_t (old_logp - ref_logp)
        A_i  = R_i - mean of the others of its group
        q_i  = exp( sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(q A, clip(q, 1-clip_low, 1+clip_high) A)

    RLOO treats a completion as one action, so its ratio q is the product of its token ratios. In an
    optimizer step of N completions, the gradient of each token has weight 1/N, whatever the length
    of its completion. The paper takes one optimizer step per batch, so the ratio is always 1. The
    clip is taken from TRL, and has an effect only with several optimizer steps per batch. With long
    completions, take few optimizer steps, because the product of ratios soon leaves the clip range.
    """
    return Objective(
        advantage=advantage.against_the_others,
        ratio=ratio.product,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        kl_in=kl_in,
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": gmpo,
    "rloo": rloo,
}
