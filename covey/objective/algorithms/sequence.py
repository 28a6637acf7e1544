"""Algorithms whose ratio, or whose clip, is of whole answers."""

from __future__ import annotations

from functools import partial
from typing import Literal

from covey.objective import advantage, ratio, shaping, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.penalty import PENALTIES, Kl


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Group Sequence Policy Optimization, arXiv 2507.18071.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        s_i  = exp( 1/T_i sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(s A, clip(s, 1-clip_low, 1+clip_high) A)

    Worth knowing: s is a geometric mean, so it moves far less than the ratio of a token; a clip of
    0.2, which fits tokens, never acts on it. With one optimizer step per rollout batch s is 1 and
    the gradient is GRPO's. The mean is over answers: over tokens it would be another algorithm
    (that is `luspo`, up to a constant), though several codes do that under this name.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def gspo_token(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """GSPO-token, arXiv 2507.18071 equations 13 to 18: the ratio of the answer, token by token.

        s_t  = sg(s_i) exp(logp - sg(logp)),  sg: no gradient
        loss = - 1/N sum_i 1/T_i sum_t min(s_t A, clip(s_t, 1-clip_low, 1+clip_high) A)

    The same value and gradient as `gspo` while all tokens of an answer have one advantage. It is
    the form to take with advantages of single tokens, such as `top_entropy` makes.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence_token,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def luspo(
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261: GSPO, times the length.

        loss = - 1/N sum_i T_i min(s A, clip(s, 1-clip_low, 1+clip_high) A)

    GSPO's division by the answer's length favours short right answers; this takes it back.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.sequence,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_sum,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def gmpo(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Geometric-Mean Policy Optimization, arXiv 2507.20673.

        z_t  = min(x, clip(x, -clip_low, clip_high)) if A > 0 else max(...),  x = logp - old_logp
        loss = - 1/N sum_i A_i exp( 1/T_i sum_t z_t )

    The bounds are of the logarithm: 0.4 lets ratios from 0.67 to 1.49 through. Passing the bounds
    of a ratio here, as 0.2 and 0.28, means exp(-0.2) and exp(0.28).
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        ratio=ratio.token,
        surrogate=partial(surrogate.geometric_clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
    )


def rloo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.05,
    kl: Kl = "k1",
    kl_in: Literal["loss", "reward"] = "reward",
) -> Objective:
    """REINFORCE Leave-One-Out, arXiv 2402.14740.

        R_i  := R_i - beta sum_t (old_logp - ref_logp)
        A_i  = R_i - mean of the others of its group
        q_i  = exp( sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(q A, clip(q, 1-clip_low, 1+clip_high) A)

    An answer is one action, so its ratio is the product over its tokens and the gradient of each
    token has weight 1/N, whatever the length. The paper takes one step per batch, where the ratio
    is 1; the clip for several steps is TRL's. For long answers the product leaves the clip range at
    once: take few optimizer steps.
    """
    return Objective(
        advantage=advantage.against_the_others,
        ratio=ratio.product,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        kl_in=kl_in,
    )


def grpo_s(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    beta1: float = 1.0,
    beta2: float = 0.1,
    mean: Literal["geometric", "arithmetic"] = "geometric",
    scope: shaping.Scope = "group",
    beta: float = 0.0,
    kl: Kl = "k3",
    ddof: int = 1,
    eps: float = 1e-6,
    entropy_floor: float = 1e-3,
) -> Objective:
    """GRPO-S, arXiv 2508.04349 (v5): rewards shaped by the mean entropy H_i of each answer.

        rs_i =  beta1 + beta2 n H_i / sum_{k in O+} H_k            for the n right answers, O+
        rs_j = -beta1 - beta2 m (1/H_j) / sum_{k in O-} 1/H_k      for the m wrong ones, O-
        A_i  = (rs_i - mean_g rs) / (std_g rs + eps)
        w_i  = exp( 1/T_i sum_t (logp - old_logp) )
        loss = - 1/N sum_i min(w A, clip(w, 1-clip_low, 1+clip_high) A)

    Choices: the paper prints w as a mean of ratios (equation 8, `mean = "arithmetic"`) and as a
    geometric mean (algorithm 1), which is our default; its sums over k are of the group in the
    equations, and of the batch in its runs (`scope`). Clip 0.2 and 0.28 practically never acts on a
    geometric mean. 1/H is taken of H no smaller than entropy_floor. Right is what the reward calls
    a success.

    Departure: a group that is all right or all wrong has advantage 0, as dynamic sampling, which
    the paper's runs use, would have it.
    """
    return Objective(
        advantage=partial(
            shaping.entropy_shaped_sequences,
            beta1=beta1,
            beta2=beta2,
            scope=scope,
            ddof=ddof,
            eps=eps,
            entropy_floor=entropy_floor,
        ),
        ratio=ratio.sequence if mean == "geometric" else ratio.arithmetic,
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        penalty=PENALTIES[kl],
        beta=beta,
        reads=shaping.SHAPED_BY_ENTROPY,
    )
