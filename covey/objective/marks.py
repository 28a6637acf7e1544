"""Marks tokens of an optimizer step by the covariance of log-probability and advantage.

    cov[i,t] = (A - mean A) (logp - mean logp)        means over all trained tokens of the step

A few tokens with a large covariance make the entropy collapse (arXiv 2505.22617). Marking tokens by
their covariance needs the log-probabilities of the whole step, which costs one more forward pass.
"""

from __future__ import annotations

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
    whole completion. So completions with the same prefix get different numbers. The choice of
    tokens does not depend on row order, micro-batches or ranks, and is the same in a resumed run.
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
