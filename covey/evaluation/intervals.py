"""Confidence intervals of accuracies, pass@k, mean rewards, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # scipy.stats takes half a second to import

CONFIDENCE = 0.95
Z = float(special.ndtri((1 + CONFIDENCE) / 2))
"""The normal quantile of the confidence level, about 1.96."""
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


def proportion(successes: int, trials: int) -> Estimate:
    """Estimate a probability from independent trials, with Wilson's interval."""
    share = successes / trials
    scale = 2 * (trials + Z**2)
    center = (2 * trials * share + Z**2) / scale
    width = Z / scale * math.sqrt(4 * trials * share * (1 - share) + Z**2)
    low = 0.0 if successes == 0 else center - width
    return Estimate(share, low, 1.0 if successes == trials else center + width)


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
    """Estimate a mean by a bootstrap over prompts; `bounds` limit the possible values.

    The interval uses expanded bootstrap percentiles (Hesterberg, arXiv 1411.5279). Ordinary
    percentiles give intervals that are too narrow: in effect, they divide the variance by `n`
    instead of `n - 1`, and use the normal distribution instead of Student's t-distribution. With a
    dozen prompts, 95 % intervals contain the true mean in 91 % of cases with ordinary percentiles,
    and in 94 % of cases with expanded percentiles.
    """
    data = np.asarray(values, dtype=float)
    mean = float(data.mean())
    if np.ptp(data) <= ROUNDING:
        return of_equal_values(mean, len(data), bounds)
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(data), (RESAMPLES, len(data)))
    tail = _expanded_tail(len(data))
    low, high = np.quantile(data[picks].mean(axis=1), [tail, 1 - tail])
    return Estimate(mean, float(low), float(high))


def of_equal_values(value: float, count: int, bounds: tuple[float, float] | None) -> Estimate:
    """Estimate a mean of equal values, for which a bootstrap interval would have width 0.

    According to Wilson's interval, at most the fraction `Z**2 / (count + Z**2)` of all possible
    prompts has a value other than `value`. Because all values lie within `bounds`, values that
    differ from `value` can shift the mean only by a limited amount. If all values are 0, or all are
    1, and the bounds are 0 and 1, the interval is Wilson's interval. If `bounds` is None, the
    interval has width 0.

    >>> of_equal_values(0.0, 100, (0.0, 1.0)).high == proportion(0, 100).high
    True
    """
    if bounds is None:
        return Estimate(value, value, value)
    share = Z**2 / (count + Z**2)
    return Estimate(value, value - share * (value - bounds[0]), value + share * (bounds[1] - value))


def _expanded_tail(size: int) -> float:
    quantile = special.stdtrit(size - 1, (1 - CONFIDENCE) / 2)
    return float(special.ndtr(math.sqrt(size / (size - 1)) * quantile))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the results of two policies on the same prompts."""

    estimate: Estimate
    """The first policy's value minus the second policy's value, averaged over prompts, with a
    bootstrap interval.
    """
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
    """Compare two policies prompt by prompt; `span` is the largest possible difference, if known.

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
    bounds = None if span is None else (-span, span)
    estimate = mean_over_prompts(differences.tolist(), seed, bounds)
    return Difference(estimate=estimate, gained=gained, lost=lost, p_value=p_value)
