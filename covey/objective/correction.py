"""Corrections for an engine whose sampling probabilities differ from the trainer's probabilities.

Each correction takes log rho and a mask, where log rho = old_logp - sampler_logp [B, T] is 0
outside the mask. A correction returns factors [B, T]; the loss multiplies the surrogate of each
token by its factor. The factors have no gradient and do not change the denominators of the loss, so
dropped tokens make the optimizer step smaller. The default is no correction, because the native
engine samples from the trainer's weights.

Importance weights of single tokens are biased for long completions. The product of token ratios
over a completion is unbiased, but for a long completion, the product is often extremely large or
small. Truncating the product shrinks the gradient of long completions, and masking by the product
drops most long completions. The geometric mean of token ratios has the same scale for short and
long completions. The geometric mean is not an importance weight, but it is a good criterion for
dropping completions.
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
    """Return the ratio clipped to [low, high]: truncated importance sampling.

    The ratio is the importance weight of decoupled PPO (arXiv 2110.00641), truncated as in verl,
    slime and open-instruct.
    """
    return of(log_rho, mask).exp().clamp(low, high)


def masked(
    log_rho: torch.Tensor, mask: torch.Tensor, *, of: ratio.Ratio, low: float, high: float
) -> torch.Tensor:
    """Return the ratio rho of each token with low <= rho <= high, and 0 for other tokens.

    With token ratios and the bounds 0.5 and 5, the correction `masked` is IcePop.
    """
    rho = of(log_rho, mask).exp()
    return rho.where((rho >= low) & (rho <= high), 0.0)


def geometric_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Return 1 if a completion's geometric mean of token ratios is in [low, high], else 0."""
    return masked(log_rho, mask, of=ratio.sequence, low=low, high=high).sign()


def divergence_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Return 1 if a completion's mean of rho - 1 - log rho is in [low, high], else 0."""
    log_rho = bounded(log_rho)
    divergence = row_mean(torch.expm1(log_rho) - log_rho, mask)
    kept = (divergence >= low) & (divergence <= high)
    return kept.to(log_rho.dtype).expand_as(mask)


def no_veto(log_rho: torch.Tensor, *, veto: float) -> torch.Tensor:
    """Return a mask [B, 1] of the completions in which every token has a ratio rho >= veto."""
    return ~(bounded(log_rho).exp() < veto).any(dim=1, keepdim=True)


def mean_one(correction: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scale correction factors so that their mean over the tokens in the mask is 1."""
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
"""Maps the name of a correction to its function."""

AGREEMENT: Mapping[str, float] = MappingProxyType({"divergence_mask": 0.0})
"""Maps the name of a correction to the value of its criterion when engine and trainer have equal
log-probs. A correction that is not in this mapping has the value 1, because its criterion is a
ratio."""
