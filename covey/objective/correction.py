"""Corrections for a sampler whose numerics differ from the trainer's.

Each takes log rho = old_logp - sampler_logp, [B, T] and 0 outside the mask, and the mask; and gives
a constant factor [B, T] for the gain of every token. The factors are never differentiated and leave
the denominators as they are: what they remove shrinks the step. The native sampler shares the
trainer's weights, so the default is no correction at all.

Token weights are biased over long completions; the product is unbiased, but its variance explodes
with length, so that truncating it punishes long completions and masking it drops them. The
geometric mean does not depend on length and is no importance weight: it is good for rejecting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from covey.objective import ratio
from covey.objective.masked import bounded, row_mean


def token_truncate(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """clip(rho, low, high) for each token: truncated importance sampling.

    Decoupled PPO, arXiv 2110.00641, with the truncation that verl, slime and open-instruct use.
    """
    return ratio.token(log_rho, mask).exp().clamp(low, high)


def token_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """rho where low <= rho <= high, else 0. IcePop's bounds are 0.5 and 5."""
    return _within(ratio.token(log_rho, mask).exp(), low, high)


def sequence_truncate(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """clip(prod_t rho, low, high) for all tokens of a completion."""
    return ratio.product(log_rho, mask).exp().clamp(low, high)


def sequence_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """prod_t rho where it lies in [low, high], else 0: the completion is dropped."""
    return _within(ratio.product(log_rho, mask).exp(), low, high)


def geometric_truncate(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """clip(exp(mean_t log rho), low, high) for all tokens of a completion."""
    return ratio.sequence(log_rho, mask).exp().clamp(low, high)


def geometric_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """1 where exp(mean_t log rho) lies in [low, high], else 0: rejection without a weight."""
    return _within(ratio.sequence(log_rho, mask).exp(), low, high).sign()


def divergence_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """1 where mean_t (rho - 1 - log rho) lies in [low, high], else 0: rejection by divergence."""
    log_rho = bounded(log_rho)
    divergence = row_mean(torch.expm1(log_rho) - log_rho, mask)
    kept = (divergence >= low) & (divergence <= high)
    return kept.to(log_rho.dtype).expand_as(mask)


def no_veto(log_rho: torch.Tensor, *, veto: float) -> torch.Tensor:
    """Mark the completions [B, 1] none of whose tokens has rho < veto."""
    return ~(bounded(log_rho).exp() < veto).any(dim=1, keepdim=True)


def mean_one(correction: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Divide by the mean over the step's tokens, so that correcting does not change its size."""
    mean = correction[mask].mean() if mask.any() else correction.new_ones(())
    return correction / mean.where(mean > 0, 1.0)


def _within(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return value.where((value >= low) & (value <= high), 0.0)


CORRECTIONS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "token_truncate": token_truncate,
        "token_mask": token_mask,
        "sequence_truncate": sequence_truncate,
        "sequence_mask": sequence_mask,
        "geometric_truncate": geometric_truncate,
        "geometric_mask": geometric_mask,
        "divergence_mask": divergence_mask,
    }
)

AGREEMENT: Mapping[str, float] = MappingProxyType({"divergence_mask": 0.0})
"""What is bounded where sampler and trainer say the same: for all others a ratio, which is 1."""
