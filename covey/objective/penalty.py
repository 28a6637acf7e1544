"""Estimators of KL(policy || reference) from sampled tokens.

Each estimator takes (d, log r, mask), where d = logp - ref_logp and log r = logp - old_logp are
tensors [B, T], clamped to +-20. An accurate estimate of the KL may have the gradient of a different
divergence:

| name       | value            | gradient    | expected gradient, on policy             |
|------------|------------------|-------------|------------------------------------------|
| `k1`       | d                | 1           | 0: noise in a loss, right in a reward    |
| `k2`       | d^2 / 2          | d           | of KL(policy, reference)                 |
| `k3`       | exp(-d) - 1 + d  | 1 - exp(-d) | of KL(reference, policy)                 |
| `k3_plus`  | that of k3       | d           | of KL(policy, reference)                 |
| `ratio_k1` | r d              | r (d + 1)   | of KL(policy, reference), off policy too |
| `ratio_k3` | r k3             | r d         | of KL(policy, reference), off policy too |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch

from covey.objective.masked import bounded, row_sum, spread

MAX_ADAPTATION = 0.2
"""`adapted_beta` clips the relative deviation from the target KL to +-MAX_ADAPTATION."""


def k1(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The KL estimator k1 = d, where d = logp - ref_logp."""
    return d


def k2(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The KL estimator k2 = d^2 / 2, where d = logp - ref_logp."""
    return d.square() / 2


def k3(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The estimator k3, exp(-d) - 1 + d, which is never negative (arXiv 2402.03300 equation 4)."""
    return torch.expm1(-d) + d


def k3_plus(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An estimator with the value of k3 and the gradient of k2."""
    slope = k2(d, log_ratio, mask)
    return k3(d.detach(), log_ratio, mask) + (slope - slope.detach())


def k3_sequence(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The estimator k3 for whole completions: d is first summed over a completion's tokens.

    The DeepSeek-R1 paper (arXiv 2501.12948) prints k3 in this form, for whole completions.
    """
    return spread(k3(bounded(row_sum(d, mask)), log_ratio, mask), mask)


def ratio_k1(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The estimator `r * d`: k1 times the importance weight r, for tokens of an older policy."""
    return log_ratio.exp() * d


def ratio_k3(d: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The estimator `r * k3`: k3 times the importance weight r, for tokens of an older policy.

    Proposed in DeepSeek-V3.2.
    """
    return log_ratio.exp() * k3(d, log_ratio, mask)


def adapted_beta(beta: float, kl: float, *, target: float, horizon: float, rollouts: int) -> float:
    """Return the KL coefficient beta, adapted toward a target KL (arXiv 1909.08593).

    The new beta is beta (1 + clip(KL / target - 1, -0.2, 0.2) min(rollouts / horizon, 1)). In
    Covey, KL and target are means over tokens; in the paper, they are sums over a completion.
    Because `rollouts / horizon` is limited to 1, a training step with more rollouts than `horizon`
    cannot make beta oscillate or become negative.
    """
    error = min(max(kl / target - 1.0, -MAX_ADAPTATION), MAX_ADAPTATION)
    return beta * (1.0 + error * min(rollouts / horizon, 1.0))


Penalty = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]

Kl = Literal["k1", "k2", "k3", "k3_plus", "k3_sequence", "ratio_k1", "ratio_k3"]

PENALTIES: Mapping[Kl, Penalty] = MappingProxyType(
    {
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "k3_plus": k3_plus,
        "k3_sequence": k3_sequence,
        "ratio_k1": ratio_k1,
        "ratio_k3": ratio_k3,
    }
)
