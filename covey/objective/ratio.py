"""Log-ratios between the policy now and the policy that the batch was collected with."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Beyond e^20 a ratio says only that something is wrong; it must still be finite."""


def token_log_ratio(logp: torch.Tensor, old_logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x[i,t] = logp - old_logp, clamped to +-20 and 0 outside the mask. The ratio is exp(x)."""
    # Padding may hold anything, NaN included, so it is replaced before the arithmetic, not after:
    # a gradient that passes through `where` on the far side of a NaN is itself NaN.
    difference = logp.where(mask, 0.0) - old_logp.where(mask, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
