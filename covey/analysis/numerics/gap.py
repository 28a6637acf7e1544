"""Numbers of a difference in log-probability, and of the ratio that it makes.

A difference is now - then, [B, T] with a mask: what a token's log-probability is one way, less what
it is another way. Its exponential is an importance ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from covey.objective.masked import bounded, row_mean
from covey.objective.ratio import PER_SEQUENCE, Ratio, token

HARMLESS = (0.999, 0.0, 0.001)
"""At least this share effective, at most this share outside the clip range, and at most this far
from 1 in the mean, which is what a bias shows in."""
SMALL = (0.95, 0.01, 0.05)
"""Likewise. What is neither matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Which ratios an objective leaves as they are."""

    low: float
    high: float
    ratio: Ratio = token
    """The objective's own: from differences of log-probabilities to the logarithm of ratios."""

    @property
    def per_answer(self) -> bool:
        """Whether all tokens of an answer share one ratio; then answers are counted."""
        return self.ratio in PER_SEQUENCE

    def row(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"low": self.low, "high": self.high, "per_answer": self.per_answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A difference over all tokens, and what it does to importance ratios."""

    tokens: int
    mean: float
    """Of the absolute difference, in nats."""
    p99: float
    """Ninety-nine of a hundred tokens differ by at most this."""
    max: float
    ratio_mean: float
    """Of exp(difference)."""
    outside: float
    """Share of ratios that the objective would clip on one side or the other."""
    effective: float
    """Effective sample size as a share: (sum of ratios)^2 / (number * sum of their squares)."""

    @property
    def verdict(self) -> str:
        """Whether it matters: harmless, small, or matters."""
        for name, (effective, outside, away) in (("harmless", HARMLESS), ("small", SMALL)):
            inside = self.outside <= outside and abs(self.ratio_mean - 1.0) <= away
            if self.effective >= effective and inside:
                return name
        return "matters"


def gap_of(difference: torch.Tensor, mask: torch.Tensor, clip: ClipRange) -> Gap:
    """Summarise a difference [B, T] over the tokens in the mask; nothing at all if there are none.

    All numbers are computed in float64.
    """
    difference = difference.double().where(mask, 0.0)
    sizes = difference[mask].abs().sort().values
    if not len(sizes):
        return Gap(tokens=0, mean=0.0, p99=0.0, max=0.0, ratio_mean=1.0, outside=0.0, effective=1.0)
    log_ratio = clip.ratio(difference, mask)
    answers = row_mean(log_ratio, mask)[mask.any(dim=1)]
    ratio = bounded(answers if clip.per_answer else log_ratio[mask]).exp()
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
