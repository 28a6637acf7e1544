"""Surrogates: the gain per token that the update raises, as a function of ratio and advantage."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gain(NamedTuple):
    """What a surrogate gives back, each [B, T]."""

    value: torch.Tensor
    clipped_low: torch.Tensor
    """bool: the ratio fell below its lower bound and the gradient is therefore 0."""
    clipped_high: torch.Tensor
    """bool: the ratio rose above its upper bound and the gradient is therefore 0."""


def clipped(
    *,
    log_ratio: torch.Tensor,
    logp: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    low: float,
    high: float,
) -> Gain:
    """min(r A, clip(r, 1 - low, 1 + high) A), the PPO surrogate (arXiv 1707.06347).

    The gradient is r A, except where A > 0 and r > 1 + high, or A < 0 and r < 1 - low: there it is
    0. A bad token whose ratio has already risen, or a good one whose ratio has fallen, is not cut.
    """
    ratio = log_ratio.exp()
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return Gain(
        value=value,
        clipped_low=mask & (advantage < 0) & (ratio < 1 - low),
        clipped_high=mask & (advantage > 0) & (ratio > 1 + high),
    )
