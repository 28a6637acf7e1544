"""Confidence intervals of accuracies, pass@k, mean rewards, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # scipy.stats takes half a second to import

CONFIDENCE = 0.95
RESAMPLES = 2000
ROUNDING = 1e-9
"""The largest difference that Covey treats as a rounding error."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def row(self) -> dict[str, float]:
        """Return plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}


def proportion(successes: float, trials: float) -> Estimate:
    """Estimate a probability from independent trials, with Clopper and Pearson's exact interval.

    The counts need not be whole: an effective number of trials is allowed.
    """
    tail, failures = (1 - CONFIDENCE) / 2, trials - successes
    low = special.betaincinv(successes, failures + 1, tail) if successes > 0 else 0.0
    high = special.betaincinv(successes + 1, failures, 1 - tail) if failures > 0 else 1.0
    return Estimate(successes / trials, float(low), float(high))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is correct.

    If c of n samples are correct, the estimate is 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374). The
    estimate is the probability that k samples, drawn without replacement from the n samples,
    contain a correct sample.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} must lie between 1 and the {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_over_prompts(
    values: Sequence[float], seed: int = 0, bounds: tuple[float, float] | None = None
) -> Estimate:
    """Estimate a mean over prompts from values that lie within `bounds`.

    Without `bounds`, they are `likely_bounds` of the values. If all values are at the bounds, the
    interval is that of `proportion`.
    """
    data = np.sort(np.asarray(values, dtype=float))
    mean, count = float(data.mean()), len(data)
    lowest, highest = likely_bounds(data) if bounds is None else bounds
    # Rewards of one rollout may exceed their bounds by rounding.
    lowest, highest = min(lowest, float(data[0])), max(highest, float(data[-1]))
    at_top = int((data >= highest - ROUNDING).sum())
    if at_top + int((data <= lowest + ROUNDING).sum()) == count:
        share, span = proportion(at_top, count), highest - lowest
        return Estimate(mean, lowest + span * share.low, lowest + span * share.high)
    tail = (1 - CONFIDENCE) / 2
    if np.ptp(data) <= ROUNDING:
        unseen = 1 - tail ** (1 / count)
        return Estimate(mean, mean - unseen * (mean - lowest), mean + unseen * (highest - mean))
    # Gaffke's interval: the weights of a Bayesian bootstrap, with one more value at the bound.
    weights = _weights(count + 1, seed)
    low = np.quantile(weights @ np.append(lowest, data), tail)
    high = np.quantile(weights @ np.append(data, highest), 1 - tail)
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


@lru_cache(maxsize=1)  # the metrics of an evaluation have the same number of prompts
def _weights(count: int, seed: int) -> NDArray[np.float64]:
    weights = np.random.default_rng(seed).exponential(size=(RESAMPLES, count))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def likely_bounds(values: ArrayLike) -> tuple[float, float]:
    """Return the bounds to assume for values whose bounds are unknown.

    They are 0 and 1, as for most rewards. A bound that the values exceed is moved beyond the most
    extreme value, by half of the range.

    >>> likely_bounds([0.0, 0.3]), likely_bounds([0.0, 3.0])
    ((0.0, 1.0), (0.0, 4.5))
    """
    lowest, highest = min(0.0, float(np.min(values))), max(1.0, float(np.max(values)))
    room = (highest - lowest) / 2
    return (
        lowest - room if lowest < -ROUNDING else 0.0,
        highest + room if highest > 1 + ROUNDING else 1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the results of two policies on the same prompts."""

    estimate: Estimate
    """The first policy's value minus the second policy's value, averaged over prompts."""
    gained: int
    """Number of prompts on which the first policy is better."""
    lost: int
    """Number of prompts on which the second policy is better."""
    p_value: float
    """Exact two-sided p-value for the null hypothesis that neither policy is better."""

    def row(self) -> dict[str, float]:
        """Return plain data."""
        counts = {"gained": self.gained, "lost": self.lost, "p_value": self.p_value}
        return {**self.estimate.row(), **counts}


def paired_difference(
    first: Sequence[float], second: Sequence[float], seed: int = 0, span: float | None = 1.0
) -> Difference:
    """Compare two policies prompt by prompt; `span` is the largest possible difference.

    Without `span`, it is the width of `likely_bounds` of all values.

    Prompts differ widely in difficulty, but difficulty mostly cancels in the difference between
    two policies on the same prompt. The interval of the mean difference is therefore much narrower
    than the intervals of the two means. The p-value comes from a sign test over the prompts on
    which the policies differ. For binary outcomes, the sign test is McNemar's exact test.

    >>> d = paired_difference([1, 1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0])
    >>> d.estimate.value, d.gained, d.lost, d.p_value
    (0.5, 5, 1, 0.21875)
    """
    from scipy import stats

    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values are not pairs")
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    gained = int((differences > ROUNDING).sum())
    lost = int((differences < -ROUNDING).sum())
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    if span is None:
        lowest, highest = likely_bounds([*first, *second])
        span = highest - lowest
    estimate = mean_over_prompts(differences.tolist(), seed, (-span, span))
    return Difference(estimate=estimate, gained=gained, lost=lost, p_value=p_value)
