"""Statistics of differences in log-prob and of the resulting importance ratios.

A difference [B, T] is each token's log-prob from one computation minus its log-prob from another
computation. The exponential of a difference is an importance ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from covey.objective.masked import bounded, row_mean
from covey.objective.ratio import PER_SEQUENCE, Ratio, token

HARMLESS = (0.999, 0.0, 0.001)
"""Limits within which log-prob differences count as "harmless". The limits are the smallest
effective sample size, the largest fraction of ratios outside the clip range, and the largest
distance of the mean ratio from 1."""
SMALL = (0.95, 0.01, 0.05)
"""Limits within which log-prob differences count as "small", in the same order as in HARMLESS.
Differences outside of the limits SMALL have the severity "matters"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The range of ratios that an objective does not clip."""

    low: float
    high: float
    ratio: Ratio = token
    """The objective's function that converts log-prob differences to log ratios."""

    @property
    def per_completion(self) -> bool:
        """Whether all tokens of a completion share one ratio."""
        return self.ratio in PER_SEQUENCE

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {"low": self.low, "high": self.high, "per_completion": self.per_completion}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Statistics of the log-prob differences of all tokens, and of the importance ratios."""

    tokens: int
    mean: float
    """Mean absolute difference, in nats."""
    p99: float
    """99th percentile of the absolute difference, in nats."""
    max: float
    ratio_mean: float
    """Mean of exp(difference)."""
    outside: float
    """The fraction of ratios outside the clip range."""
    effective: float
    """Relative effective sample size, `(sum of ratios)^2 / (count * sum of squared ratios)`."""

    @property
    def severity(self) -> str:
        """The severity of the log-prob differences, either `harmless`, `small` or `matters`."""
        for name, (effective, outside, away) in (("harmless", HARMLESS), ("small", SMALL)):
            inside = self.outside <= outside and abs(self.ratio_mean - 1.0) <= away
            if self.effective >= effective and inside:
                return name
        return "matters"


def gap_of(difference: torch.Tensor, mask: torch.Tensor, clip: ClipRange) -> Gap:
    """Return statistics of the log-prob differences [B, T] of the tokens in `mask`."""
    difference = difference.double().where(mask, 0.0)
    sizes = difference[mask].abs().sort().values
    if not len(sizes):
        return Gap(tokens=0, mean=0.0, p99=0.0, max=0.0, ratio_mean=1.0, outside=0.0, effective=1.0)
    log_ratio = clip.ratio(difference, mask)
    sequences = row_mean(log_ratio, mask)[mask.any(dim=1)]
    ratio = bounded(sequences if clip.per_completion else log_ratio[mask]).exp()
    outside = (ratio < clip.low) | (ratio > clip.high)
    return Gap(
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(sizes[math.ceil(0.99 * len(sizes)) - 1]),
        max=float(sizes[-1]),
        ratio_mean=float(ratio.mean()),
        outside=float(outside.double().mean()),
        effective=float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    )
