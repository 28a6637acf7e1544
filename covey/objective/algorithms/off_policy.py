"""Algorithms for stale data, which limit how far the policy moves from the sampling policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from covey.objective import advantage, marks, surrogate, weights
from covey.objective.correction import CORRECTIONS
from covey.objective.loss import Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl


@algorithm(title="Balanced Policy Optimization with adaptive clipping", source="arXiv 2510.18927")
def bapo(
    *, target: float = 0.4, low_start: float = 0.6, low_end: float = 0.9, low_step: float = 0.02,
    high_start: float = 1.2, high_end: float = 3.0, high_step: float = 0.05,
    measure: Literal['gradient', 'value'] = "gradient", beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """
        while share < target and c_low can rise: raise c_high, and c_low once c_high is at its end
        share = S+ / (S+ + S-),  S+ = sum of r A with A > 0, r < c_high,  S- of r |A| with r > c_low
        loss  = - 1/T sum_i sum_t min(r A, clip(r, c_low, c_high) A),  r = exp(logp - sampler_logp)

    In a stale batch, tokens with a negative advantage dominate the surrogate. BAPO raises the clip
    bounds c_low and c_high until tokens with a positive advantage make up the fraction `target` of
    the step's surrogate. Covey computes the clip bounds once per optimizer step, over all
    micro-batches and ranks, at the cost of one more forward pass.

    Choices: the fraction `share` leaves out clipped tokens, because clipped tokens have no
    gradient. With `measure = "value"`, `share` follows equation 8 as printed in the paper, in which
    the clip bound replaces the ratio of a clipped token. With `measure = "value"`, raising c_low
    lowers the share of tokens with a positive advantage, although the paper's text says the
    opposite. The authors' code raises c_low first, and computes both clip bounds per micro-batch.

    Worth knowing: on policy, no token is clipped, and `bapo` equals `grpo` with a mean over tokens.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=surrogate.clipped_at_marks,
        weights=weights.token_mean,
        marks=partial(
            marks.balanced_bounds,
            target=target,
            low_start=low_start,
            low_end=low_end,
            low_step=low_step,
            high_start=high_start,
            high_end=high_end,
            high_step=high_step,
            measure=measure,
        ),
        beta=beta,
        penalty=PENALTIES[kl],
        reads=frozenset({"groups", "sampler_as_old"}),
    )


@algorithm(title="Second-Moment trust Policy Optimization", source="arXiv 2510.01161")
def m2po(
    *, tau: float = 0.04, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6
) -> Objective:
    """Bounds the mean of (log r)^2.

        H    = tokens with A > 0 and r > 1, or A < 0 and r < 1
        drop the largest (log r)^2 of H until the mean of the rest is at most tau
        loss = - 1/T sum_i sum_t kept r A,  r = exp(logp - sampler_logp)

    `m2po` drops a few outlier tokens, which still count in the token count T. Tokens that are not
    dropped get unclipped importance weights. Covey chooses the outliers over a whole optimizer
    step, at the cost of one more forward pass. The authors' code chooses outliers per micro-batch,
    clips ratios, and bounds a different mean than Covey.

    Worth knowing: on policy, no token is dropped, and `m2po` equals `grpo` with a mean over tokens
    and without a clip.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=surrogate.unclipped_without_marked,
        weights=weights.token_mean,
        marks=partial(marks.beyond_second_moment, tau=tau),
        beta=beta,
        penalty=PENALTIES[kl],
        reads=frozenset({"groups", "sampler_as_old"}),
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
    "bapo": bapo,
    "m2po": m2po,
    "decoupled_ppo": decoupled_ppo,
}
