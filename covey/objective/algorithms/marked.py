"""Algorithms that select tokens or clip bounds from the log-probabilities of a whole step.

Clip-Cov and KL-Cov select tokens by the covariance of log-probability and advantage, because a few
tokens with a large covariance make the policy's entropy collapse (arXiv 2505.22617).

    cov[i,t] = (A - mean A) (logp - mean logp)        means over the tokens of the step

The means include only tokens that get a policy gradient: with the option `top_entropy`, the tokens
that it keeps.

M2PO selects the tokens to drop, and BAPO selects the clip bounds. M2PO and BAPO train on stale
data, so their ratio r is relative to the policy that generated the data. In M2PO and BAPO, the
ratio r uses `sampler_logp` instead of `old_logp`. All functions of this module need the
log-probabilities of the whole step at once, which takes one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from covey.objective import advantage, surrogate, weights
from covey.objective.loss import Objective
from covey.objective.masked import bounded, difference, scored_tokens
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl
from covey.types import Batch


def covariance(advantage: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A) (logp - mean logp) for each token, [B, T]; 0 outside the mask."""
    count = mask.sum().clamp(min=1)

    def centered(values: torch.Tensor) -> torch.Tensor:
        clean = values.double().where(mask, 0.0)
        return (clean - clean.sum() / count).where(mask, 0.0)

    return centered(advantage) * centered(logp)


def random_within_bounds(
    batch: Batch, logp: torch.Tensor, *, share: float = 2e-4, cov_low: float = 1.0,
    cov_high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Select random tokens whose covariance is between `cov_low` and `cov_high`. Clip-Cov.

    The function selects the fraction `share` of the tokens that get a policy gradient, and at least
    one token if there are candidates. Tokens that are already clipped are not candidates.
    """
    mask, advantage = _with_gradient(batch), _advantage(batch)
    ratio = _log_ratio(batch, logp).exp()
    cut = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    cov = covariance(advantage, logp, mask)
    candidates = mask & ~cut & (cov > cov_low) & (cov < cov_high)
    return _largest(_shuffled(batch), candidates, share * int(mask.sum()))


def largest(batch: Batch, logp: torch.Tensor, *, share: float = 2e-4) -> torch.Tensor:
    """Select the tokens with the largest positive covariance. KL-Cov.

    The function selects the fraction `share` of the tokens that get a policy gradient, and at least
    one token. If all advantages of an optimizer step are 0, every covariance is 0 and no token is
    selected.
    """
    mask = _with_gradient(batch)
    cov = covariance(_advantage(batch), logp, mask)
    return _largest(cov, mask & (cov > 0), share * int(mask.sum()))


def _largest(values: torch.Tensor, among: torch.Tensor, count: float) -> torch.Tensor:
    """Return a mask of the `count` largest values (at least one) inside the mask `among`."""
    flat = values.masked_fill(~among, -torch.inf).flatten()
    picked = flat.topk(min(max(1, int(count)), int(among.sum()))).indices
    return torch.zeros_like(among).flatten().index_fill(0, picked, True).view_as(among)


def _shuffled(batch: Batch) -> torch.Tensor:
    """Return a reproducible pseudorandom number for each token, [B, T].

    A token's number combines two hashes of the engine's log-probabilities: of the tokens up to this
    token, and of the whole completion. Hashing the whole completion gives the tokens of a common
    prefix different numbers in different completions. The numbers do not depend on row order,
    micro-batches or ranks, and are the same in a resumed run.
    """
    bits = batch.sampler_logp.where(batch.mask, 0.0).double().contiguous().view(torch.int64)
    odd, other = -7046029254386353131, -4658895280553007687  # constants of SplitMix64 and xxHash
    mixed = (bits ^ (bits >> 29)) * other
    each = mixed * odd + 1
    completion = each.where(batch.mask, 0).sum(dim=1, keepdim=True)
    history = each.cumsum(dim=1) + (completion ^ (completion >> 31)) * other
    mixed = (history ^ (history >> 32)) * odd
    mixed = (mixed ^ (mixed >> 29)) * other
    return (mixed ^ (mixed >> 32)).double()


def beyond_second_moment(batch: Batch, logp: torch.Tensor, *, tau: float = 0.04) -> torch.Tensor:
    """Select tokens to drop until the mean of (log r)^2 is at most tau. M2PO, 2510.01161.

    The mean is over the remaining tokens whose ratio r would move further from 1 in an optimizer
    step. The ratio r moves further from 1 if A > 0 and r > 1, or if A < 0 and r < 1. The tokens
    with the largest (log r)^2 are dropped first. Among tokens with equal (log r)^2, earlier tokens
    are dropped first.
    """
    log_ratio, advantage = _log_ratio(batch, logp), _advantage(batch)
    further = scored_tokens(batch) & (advantage * log_ratio > 0)
    squares = log_ratio.double().square()[further]
    order = squares.argsort(descending=True, stable=True)
    remaining = squares[order].flip(0).cumsum(0).flip(0)
    count = torch.arange(len(order), 0, -1, device=order.device)
    dropped = torch.zeros_like(further[further])
    dropped[order[: int((remaining / count > tau).sum())]] = True
    return torch.zeros_like(further).masked_scatter(further, dropped)


def balanced_bounds(
    batch: Batch,
    logp: torch.Tensor,
    *,
    target: float = 0.4,
    low_start: float = 0.6,
    low_end: float = 0.9,
    low_step: float = 0.02,
    high_start: float = 1.2,
    high_end: float = 3.0,
    high_step: float = 0.05,
    measure: Literal["gradient", "value"] = "gradient",
) -> torch.Tensor:
    """Return the clip bound of each token's ratio: an upper bound if A > 0, else a lower bound.

    Algorithm 1 of BAPO (arXiv 2510.18927) first raises the upper clip bound, up to its maximum, and
    then raises the lower clip bound. The search stops when tokens with A > 0 make up at least the
    fraction `target` of the step's surrogate, or when both clip bounds are at their maximum.
    """
    ratio, advantage = _log_ratio(batch, logp).double().exp(), _advantage(batch).double()
    advantage = advantage.where(scored_tokens(batch), 0.0)
    share = positive_share if measure == "gradient" else positive_value_share
    low, high, slack = low_start, high_start, 1e-9  # against rounding
    while share(ratio, advantage, low, high) < target and low + low_step <= low_end + slack:
        if high + high_step <= high_end + slack:
            high += high_step
        else:
            low += low_step
    return torch.full_like(advantage, low).masked_fill(advantage > 0, high)


def positive_share(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> float:
    """Return the fraction of the sum of r |A| that comes from tokens with A > 0.

    The sum of r |A| includes only unclipped tokens, so raising either clip bound increases the
    fraction from tokens with A > 0. If the sum of r |A| is 0, the function returns 1.
    """
    moving = torch.where(advantage > 0, ratio < high, ratio > low) & (advantage != 0)
    size = (ratio * advantage).where(moving, 0.0)
    total = float(size.abs().sum())
    return float(size.clamp(min=0).sum()) / total if total else 1.0


def positive_value_share(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> float:
    """Return the fraction of sum |min(r A, clip(r) A)| that comes from tokens with A > 0.

    The formula is equation 8 of the BAPO paper, in which the clip bound replaces the ratio of a
    clipped token. With equation 8, raising the lower clip bound increases the contribution of
    tokens with A < 0, and decreases the fraction that this function returns.
    """
    value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).abs()
    total = float(value.sum())
    return float(value.where(advantage > 0, 0.0).sum()) / total if total else 1.0


def _with_gradient(batch: Batch) -> torch.Tensor:
    """Return a mask [B, T] of the scored tokens that `top_entropy` keeps."""
    mask = scored_tokens(batch)
    return mask if batch.selected is None else mask & batch.selected


def _log_ratio(batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    old_logp = logp if batch.old_logp is None else batch.old_logp
    return bounded(difference(logp, old_logp, batch.mask))


def _advantage(batch: Batch) -> torch.Tensor:
    assert batch.advantage is not None, "with_advantage comes first"
    return batch.advantage


@algorithm(title="Clip-Cov", source="arXiv 2505.22617")
def clip_cov(
    *, clip_low: float = 1.0, clip_high: float = 1.0, share: float = 2e-4, cov_low: float = 1.0,
    cov_high: float = 5.0, beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """No gradient for the few tokens that would collapse the entropy.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A), but 0 for
               max(1, share T) random tokens with cov_low < cov < cov_high that are not clipped

    Choices: the covariance cov is computed over the whole optimizer step instead of per
    micro-batch, at the cost of one more forward pass. The random choice of tokens uses a hash of
    the engine's log-probs, so the choice does not depend on the order of completions or on the
    micro-batches.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.clipped_without_marked, clip_low=clip_low, clip_high=clip_high),
        weights=weights.token_mean,
        marks=partial(
            random_within_bounds,
            share=share,
            cov_low=cov_low,
            cov_high=cov_high,
            clip_low=clip_low,
            clip_high=clip_high,
        ),
        beta=beta,
        penalty=PENALTIES[kl],
    )


@algorithm(title="KL-Cov", source="arXiv 2505.22617")
def kl_cov(
    *, share: float = 2e-4, coefficient: float = 1.0, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """A KL penalty on the few tokens that lower the entropy most.

        cov  = (A - mean A) (logp - mean logp), over the tokens of the optimizer step
        loss = - 1/T sum_i sum_t [ r A - coefficient |logp - old_logp| on the max(1, share T)
               tokens with the largest cov ]

    `kl_cov` does not clip ratios, and penalizes only tokens with a positive covariance. Covey
    computes the covariance over a whole optimizer step instead of per micro-batch, at the cost of
    one more forward pass.
    """
    return Objective(
        advantage=partial(advantage.group_standardized, ddof=ddof, eps=eps),
        surrogate=partial(surrogate.penalized_where_marked, coefficient=coefficient),
        weights=weights.token_mean,
        marks=partial(largest, share=share),
        beta=beta,
        penalty=PENALTIES[kl],
    )


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
            balanced_bounds,
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
        marks=partial(beyond_second_moment, tau=tau),
        beta=beta,
        penalty=PENALTIES[kl],
        reads=frozenset({"groups", "sampler_as_old"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "bapo": bapo,
    "m2po": m2po,
}
