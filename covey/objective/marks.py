"""Selects tokens or clip bounds from the log-probabilities of a whole optimizer step.

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

from typing import Literal

import torch

from covey.objective.masked import bounded, difference, scored_tokens
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
