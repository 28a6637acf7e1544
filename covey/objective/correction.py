"""Corrections for a sampler whose numerics differ from the trainer's.

Each correction takes log rho = old_logp - sampler_logp, [B, T] and 0 outside the mask, and the
mask. It returns a constant factor [B, T] for the gain of every token. The factors have no gradient
and do not change the denominators, so dropped tokens make the step smaller. The native engine
samples from the trainer's weights, so the default is no correction.

Token weights are biased for long completions. The product over a completion is unbiased, but its
variance explodes with length, so truncation penalises long completions and masking drops them. The
scale of the geometric mean does not depend on length. It is not an importance weight, but a good
criterion for rejection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from covey.objective import ratio
from covey.objective.masked import bounded, row_mean


def truncated(
    log_rho: torch.Tensor, mask: torch.Tensor, *, of: ratio.Ratio, low: float, high: float
) -> torch.Tensor:
    """clip(rho, low, high): truncated importance sampling.

    Decoupled PPO, arXiv 2110.00641, with the truncation that verl, slime and open-instruct use.
    """
    return of(log_rho, mask).exp().clamp(low, high)


def masked(
    log_rho: torch.Tensor, mask: torch.Tensor, *, of: ratio.Ratio, low: float, high: float
) -> torch.Tensor:
    """rho where low <= rho <= high, else 0. With token ratios and bounds 0.5 and 5 it is IcePop."""
    rho = of(log_rho, mask).exp()
    return rho.where((rho >= low) & (rho <= high), 0.0)


def geometric_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """1 where exp(mean_t log rho) lies in [low, high], else 0: rejection without a weight."""
    return masked(log_rho, mask, of=ratio.sequence, low=low, high=high).sign()


def divergence_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """1 where mean_t (rho - 1 - log rho) lies in [low, high], else 0: rejection by divergence."""
    log_rho = bounded(log_rho)
    divergence = row_mean(torch.expm1(log_rho) - log_rho, mask)
    kept = (divergence >= low) & (divergence <= high)
    return kept.to(log_rho.dtype).expand_as(mask)


def no_veto(log_rho: torch.Tensor, *, veto: float) -> torch.Tensor:
    """Return a mask [B, 1] of the completions in which every token has rho >= veto."""
    return ~(bounded(log_rho).exp() < veto).any(dim=1, keepdim=True)


def mean_one(correction: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Divide factors by their mean over the step's tokens, to keep the size of the step."""
    mean = correction[mask].mean() if mask.any() else correction.new_ones(())
    return correction / mean.where(mean > 0, 1.0)


CORRECTIONS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "token_truncate": partial(truncated, of=ratio.token),
        "token_mask": partial(masked, of=ratio.token),
        "sequence_truncate": partial(truncated, of=ratio.product),
        "sequence_mask": partial(masked, of=ratio.product),
        "geometric_truncate": partial(truncated, of=ratio.sequence),
        "geometric_mask": geometric_mask,
        "divergence_mask": divergence_mask,
    }
)
"""The corrections, by token ratio, product over a completion, geometric mean, or divergence."""

AGREEMENT: Mapping[str, float] = MappingProxyType({"divergence_mask": 0.0})
"""Value of the bounded quantity if sampler and trainer agree, where it is not 1 as for a ratio."""
