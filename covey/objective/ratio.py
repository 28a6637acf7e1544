"""Log-ratios between the current policy and the policy that collected the batch.

Each function takes x = logp - old_logp, [B, T] and 0 outside the mask, and the mask. It returns the
log-ratio [B, T], clamped to +-20 and 0 outside the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from covey.objective.masked import bounded, row_sum, sequence_mean, spread


def token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log r = x, for each token."""
    return bounded(x)


def sequence(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log s = 1/T_i sum_t x, the same for every token of a completion. GSPO, arXiv 2507.18071."""
    return bounded(sequence_mean(x, mask))


def sequence_token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The value of log s, but the gradient of the token's own logp. GSPO-token, the same paper.

    If all tokens of a completion have the same advantage, the gradient is that of `sequence`; here
    each token may have its own advantage.
    """
    return sequence(x.detach(), mask) + (x - x.detach())


def product(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log q = sum_t x: the ratio of whole completions as single actions. RLOO, arXiv 2402.14740."""
    return spread(bounded(row_sum(x, mask)), mask)


def arithmetic(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log w, w = 1/T_i sum_t exp(x): the mean of ratios. GRPO-S equation 8, arXiv 2508.04349."""
    # Outside the mask there is no mean; any positive number keeps its log finite, and 1 gives 0.
    return sequence_mean(bounded(x).exp(), mask).where(mask, 1.0).log()


def one(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The value 0 with the gradient of x: REINFORCE, as if data were always on policy."""
    return x - x.detach()


Ratio = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

RATIOS: Mapping[str, Ratio] = MappingProxyType(
    {
        "token": token,
        "sequence": sequence,
        "sequence_token": sequence_token,
        "product": product,
        "arithmetic": arithmetic,
        "one": one,
    }
)

PER_SEQUENCE: frozenset[Ratio] = frozenset({sequence, sequence_token, product, arithmetic})
"""Ratios that all tokens of a completion share; diagnostics count each completion once."""
