"""Marks tokens of an optimizer step by the covariance of log-probability and advantage.

    cov[i,t] = (A - mean A) (logp - mean logp)        means over all trained tokens of the step

A few tokens with a large covariance make the entropy collapse (arXiv 2505.22617). Marking tokens by
their covariance needs the log-probabilities of the whole step, which costs one more forward pass.
Other rules mark tokens by how far the policy has moved from the sampler (`beyond_second_moment`,
`balanced_bounds`).
"""

from __future__ import annotations

from typing import Literal

import torch

from covey.objective.masked import bounded, difference
from covey.types import Batch


def covariance(advantage: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the covariance `cov` of each token [B, T], and 0 outside the mask."""
    count = mask.sum().clamp(min=1)

    def centered(values: torch.Tensor) -> torch.Tensor:
        clean = values.double().where(mask, 0.0)
        return (clean - clean.sum() / count).where(mask, 0.0)

    return centered(advantage) * centered(logp)


def random_within_bounds(
    batch: Batch, logp: torch.Tensor, *, share: float = 2e-4, cov_low: float = 1.0,
    cov_high: float = 5.0, clip_low: float = 1.0, clip_high: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Mark max(1, share T) random tokens among the tokens with cov_low < cov < cov_high. Clip-Cov.

    Tokens that are already clipped are not candidates.
    """
    assert batch.advantage is not None
    mask, advantage = scored_tokens(batch), batch.advantage
    old_logp = logp if batch.old_logp is None else batch.old_logp
    ratio = bounded(difference(logp, old_logp, mask)).exp()
    cut = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    cov = covariance(advantage, logp, mask)
    candidates = mask & ~cut & (cov > cov_low) & (cov < cov_high)
    return _largest(_shuffled(batch), candidates, _count(mask, share))


def largest(batch: Batch, logp: torch.Tensor, *, share: float = 2e-4) -> torch.Tensor:
    """Mark the max(1, share T) tokens with the largest cov, if their cov is positive. KL-Cov.

    If all advantages of a step are 0, every cov is 0 and no token is marked.
    """
    assert batch.advantage is not None
    mask = scored_tokens(batch)
    cov = covariance(batch.advantage, logp, mask)
    return _largest(cov, mask & (cov > 0), _count(mask, share))


def scored_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask [B, T] without the tokens of rollouts whose scoring failed."""
    return batch.mask & ~batch.rewards.isnan()[:, None]


def _count(mask: torch.Tensor, share: float) -> int:
    return max(1, int(share * int(mask.sum())))


def _largest(values: torch.Tensor, among: torch.Tensor, count: int) -> torch.Tensor:
    flat = values.masked_fill(~among, -torch.inf).flatten()
    picked = flat.topk(min(count, int(among.sum()))).indices
    return torch.zeros_like(among).flatten().index_fill(0, picked, True).view_as(among)


def _shuffled(batch: Batch) -> torch.Tensor:
    """Return a reproducible pseudorandom number for each token, [B, T].

    The number is a hash of the sampler's log-probabilities, both of the tokens so far and of the
    whole completion. Completions with the same prefix therefore get different pseudorandom numbers.
    The choice of tokens does not depend on row order, micro-batches or ranks, and is the same in a
    resumed run.
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


# Choose the tokens to drop (M2PO), or the clip bounds (BAPO), over a whole optimizer step.
#
# M2PO and BAPO, the methods of this module, train on stale data. In M2PO and BAPO, the ratio r is
# relative to the policy that generated the data, so sampler_logp is used instead of old_logp.
# M2PO and BAPO need the log-probabilities of the whole step at once, which takes one more forward
# pass.


def beyond_second_moment(batch: Batch, logp: torch.Tensor, *, tau: float = 0.04) -> torch.Tensor:
    """Mark the tokens to drop so that the mean of (log r)^2 is at most tau. M2PO, 2510.01161.

    The mean is over the tokens whose ratio the optimizer step would move further from 1. The step
    moves the ratio further from 1 for tokens with A > 0 and r > 1, or A < 0 and r < 1. The tokens
    with the largest (log r)^2 are dropped first. Among equal values, earlier tokens are dropped
    first.
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
    """Return the bound of each token's ratio: the upper bound if A > 0, or else the lower bound.

    The search for the bounds is algorithm 1 of BAPO (arXiv 2510.18927). The upper bound rises
    first, and then the lower bound. The bounds stop rising when tokens with A > 0 make up at least
    the fraction `target` of the step's surrogate, or when both bounds are at their maximum.
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
    """Return the share of tokens with A > 0 in the sum of r |A| over all unclipped tokens.

    The share is 1 if there are no unclipped tokens. Raising the upper or the lower clip bound
    raises the share of tokens with A > 0.
    """
    moving = torch.where(advantage > 0, ratio < high, ratio > low) & (advantage != 0)
    size = (ratio * advantage).where(moving, 0.0)
    total = float(size.abs().sum())
    return float(size.clamp(min=0).sum()) / total if total else 1.0


def positive_value_share(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> float:
    """Return the share of tokens with A > 0 in the sum of |min(r A, clip(r) A)| over all tokens.

    The formula is BAPO's equation 8. A clipped token counts with its bound instead of its ratio.
    Raising the lower bound therefore increases the contribution of tokens with A < 0, and lowers
    the share of tokens with A > 0.
    """
    value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).abs()
    total = float(value.sum())
    return float(value.where(advantage > 0, 0.0).sum()) / total if total else 1.0


def _log_ratio(batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    old_logp = logp if batch.old_logp is None else batch.old_logp
    return bounded(difference(logp, old_logp, batch.mask))


def _advantage(batch: Batch) -> torch.Tensor:
    assert batch.advantage is not None, "with_advantage comes first"
    return batch.advantage
