"""Log-ratios between the current policy and the policy that collected the batch.

Each function takes (x, mask), where x = logp - old_logp [B, T] is 0 outside the mask. Each function
returns the log-ratio [B, T], which is clamped to +-20, and is 0 outside the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from covey.objective.masked import bounded, row_sum, sequence_mean, spread


def token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-ratio of each token, log r = x."""
    return bounded(x)


def sequence(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The completion's mean log-ratio, log s = 1/T_i sum_t x, at each token of the completion.

    GSPO, arXiv 2507.18071.
    """
    return bounded(sequence_mean(x, mask))


def sequence_token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean log-ratio of the completion, but with the gradient of the token's own logp.

    The GSPO paper calls this ratio GSPO-token.
    """
    return sequence(x.detach(), mask) + (x - x.detach())


def product(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The summed log-ratio log q = sum_t x, which treats the whole completion as one action.

    RLOO, arXiv 2402.14740.
    """
    return spread(bounded(row_sum(x, mask)), mask)


def arithmetic(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logarithm of the mean token ratio: log w, where w = 1/T_i sum_t exp(x).

    GRPO-S, arXiv 2508.04349, equation 8.
    """
    # Outside the mask, there is no mean. The number 1 gives a log-ratio of 0 there.
    return sequence_mean(bounded(x).exp(), mask).where(mask, 1.0).log()


def one(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-ratio 0 with the gradient of logp, for REINFORCE, which treats data as on-policy."""
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
"""The functions that give one ratio per completion; their diagnostics count each completion
once."""
