"""Corrections for a sampler whose numerics differ from the trainer's.

Each gives a constant factor [B, T] for the gain of every token. The factors are never
differentiated and leave the denominators as they are. The native sampler shares the trainer's
weights, so its default is none at all.
"""

from __future__ import annotations

import torch

from covey.objective.ratio import token_log_ratio


def none(old_logp: torch.Tensor, sampler_logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """1 everywhere."""
    return torch.ones_like(old_logp)


def truncated(
    old_logp: torch.Tensor, sampler_logp: torch.Tensor, mask: torch.Tensor, *, max_weight: float
) -> torch.Tensor:
    """min(exp(old_logp - sampler_logp), max_weight) for each token: truncated importance sampling.

    Decoupled PPO, arXiv 2110.00641, with the truncation that verl, slime and open-instruct use.
    """
    return token_log_ratio(old_logp, sampler_logp, mask).exp().clamp(max=max_weight).detach()
