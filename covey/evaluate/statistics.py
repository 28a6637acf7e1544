"""Accuracies with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def proportion(successes: int, trials: int) -> Estimate:
    """Estimate a probability from independent trials; Wilson's interval."""
    interval = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the chance that k samples hold a right one.

    1 - C(n - c, k) / C(n, k), arXiv 2107.03374: the share of the k-subsets of what was sampled
    that hold a right answer.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} must lie between 1 and the {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_over_prompts(values: Sequence[float], seed: int = 0) -> Estimate:
    """Estimate a mean over prompts, with a bootstrap over prompts: their samples go together."""
    data = np.asarray(values, dtype=float)
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(data), (RESAMPLES, len(data)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(data[picks].mean(axis=1), [tail, 1 - tail])
    return Estimate(float(data.mean()), float(low), float(high))
