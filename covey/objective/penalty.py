"""Estimators of KL(policy || reference) from sampled tokens, with d = logp - ref_logp."""

from __future__ import annotations

import torch

MAX_DIFFERENCE = 20.0
"""d is clamped to +-20, so that exp(-d) is finite; beyond it the gradient is 0."""


def k3(*, logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, arXiv 2402.03300 equation 4; never negative, 0 outside the mask.

    Its value estimates KL(policy || reference) without bias. Its gradient, 1 - exp(-d), is in
    expectation that of KL(reference || policy): the other direction. It is what GRPO prints.
    """
    difference = logp.where(mask, 0.0) - ref_logp.where(mask, 0.0)
    difference = difference.clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    return torch.expm1(-difference) + difference
