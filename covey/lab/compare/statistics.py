"""Statistical tests, intervals and power analysis for runs with several seeds.

Every seed is measured on the same held-out prompts, so seeds and prompts are crossed factors.
Arrays have the shape [seeds] or [seeds, prompts]. To simulate many experiments at once, arrays can
have additional leading axes. See docs/statistics.md for the reasons for these tests and intervals,
and for their error rates.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from covey.evaluation.intervals import (
    ROUNDING,
    Estimate,
    likely_bounds,
    mean_over_prompts,
    paired_difference,
)

Array = NDArray[Any]
Bounds = tuple[float, float]

LEVEL = 0.05
POWER = 0.8
ASSURANCE = 0.9
"""The probability with which `detectable` is at least the difference that has the power POWER."""
MOST_SEEDS = 1000
"""The largest number of seeds that `seeds_needed` considers."""
FEW_SEEDS = 3
"""The smallest number of seeds that is enough to rank two arms. With two seeds, the confidence
interval is too wide to rank arms."""
COLLAPSE_LEVEL = 0.01
"""A drop in accuracy counts as a collapse if its p-value is below COLLAPSE_LEVEL. COLLAPSE_LEVEL is
lower than the usual 5 %, because a run's best evaluation is partly luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """A mean over seeds and prompts, with the two components of its variance."""

    mean: Array
    over_seeds: Array
    """The part of the mean's variance that comes from the choice of seeds, for fixed prompts."""
    over_items: Array
    """The part of the mean's variance that comes from the choice of prompts."""


def crossed(values: Array) -> Crossed:
    """Return the mean of `values` [..., seeds, prompts], and the two components of its variance.

    The variance components come from a two-way analysis of variance in which seeds and prompts are
    random factors. The variance between prompts cannot be computed from one accuracy per seed,
    because a prompt that is hard for every seed lowers all accuracies alike. The variance between
    prompts is the variance of the per-prompt means minus the residual variance of the two-way
    model.
    """
    values = np.asarray(values, dtype=float)
    seeds, items = values.shape[-2:]
    by_seed, by_item = values.mean(axis=-1), values.mean(axis=-2)
    mean = by_seed.mean(axis=-1)
    over_seeds = by_seed.var(axis=-1, ddof=1) / seeds
    if items == 1:
        return Crossed(mean=mean, over_seeds=over_seeds, over_items=np.zeros_like(mean))
    rest = values - by_seed[..., :, None] - by_item[..., None, :] + mean[..., None, None]
    noise = (rest**2).sum(axis=(-1, -2)) / ((seeds - 1) * (items - 1)) / (seeds * items)
    over_items = np.maximum(0.0, by_item.var(axis=-1, ddof=1) / items - noise)
    return Crossed(mean=mean, over_seeds=over_seeds, over_items=over_items)


def half_width(parts: Crossed, seeds: int, items: int, level: float = LEVEL) -> Array:
    """Return the half-width of the `1 - level` interval of a mean over seeds and prompts.

    Each variance component is multiplied by the squared t quantile for its own degrees of freedom.
    With two seeds, the t quantile is 12.7 for the variance between seeds, but about 2 for the
    variance between prompts.
    """
    width = _quantile(seeds - 1, level) ** 2 * parts.over_seeds
    if items > 1:
        width = width + _quantile(items - 1, level) ** 2 * parts.over_items
    return np.asarray(np.sqrt(width))


def _quantile(freedom: int, level: float = LEVEL) -> float:
    return float(stats.t.ppf(1 - level / 2, freedom))


def accuracy_bounds(values: Array) -> tuple[Array, Array, Array]:
    """Return the mean accuracy, and the lower and the upper bound of its confidence interval.

    `values` [..., seeds, prompts] contains the accuracies of at least two seeds. The bounds are
    those of Clopper and Pearson for the number of independent completions that would give the same
    standard error (Korn and Graubard), so they stay within [0, 1], and never coincide.
    """
    seeds, items = values.shape[-2:]
    parts = crossed(values)
    scatter = parts.mean * (1 - parts.mean)
    half = half_width(parts, seeds, items)
    # If every completion is correct, there is no variance: only the prompts are a sample.
    known = (half > 0) & (scatter > 0)
    normal = stats.norm.ppf(1 - LEVEL / 2)
    trials = np.where(known, scatter * (normal / np.where(known, half, 1.0)) ** 2, items)
    solved = parts.mean * trials
    failed, tail = trials - solved, LEVEL / 2
    least = np.finfo(float).tiny  # instead of 0, for which the incomplete beta function is nan
    low = special.betaincinv(np.maximum(solved, least), failed + 1, tail)
    high = special.betaincinv(solved + 1, np.maximum(failed, least), 1 - tail)
    low, high = np.where(solved > 0, low, 0.0), np.where(failed > 0, high, 1.0)
    return parts.mean, np.minimum(low, parts.mean), np.maximum(high, parts.mean)


def accuracy(values: Array, bounds: Bounds = (0.0, 1.0)) -> Estimate:
    """Estimate the mean accuracy of one arm from `values` [seeds, prompts] within `bounds`.

    With a single seed, the confidence interval covers the choice of prompts but not the choice of
    seeds.
    """
    values = np.asarray(values, dtype=float)
    if len(values) == 1:
        return mean_over_prompts(values[0].tolist(), bounds=bounds)
    span = bounds[1] - bounds[0]
    _, low, high = (bounds[0] + span * end for end in accuracy_bounds((values - bounds[0]) / span))
    return Estimate(float(values.mean(axis=1).mean()), float(low), float(high))


def mean_reward(values: Array) -> Estimate:
    """Estimate the mean of rewards [seeds, prompts], whose bounds are unknown."""
    return accuracy(values, likely_bounds(values))


def change(values: Array, limit: float = 1.0, level: float = LEVEL) -> Estimate:
    """Return the mean of the differences `values` [seeds, prompts], with its confidence interval.

    `limit` is the largest possible difference: 1 for accuracies.
    """
    seeds, items = values.shape
    if seeds > 1:
        parts = crossed(values)
        mean, half = float(parts.mean), float(half_width(parts, seeds, items, level))
        if half > ROUNDING:
            return Estimate(mean, max(-limit, mean - half), min(limit, mean + half))
    return mean_over_prompts(values.mean(axis=0).tolist(), bounds=(-limit, limit))


def seed_deviation(differences: Array, items: int, span: float = 1.0) -> Array:
    """Return the standard deviation of per-seed differences [..., seeds].

    With n prompts, accuracies are multiples of `1 / n`, so two seeds often have equal differences.
    A standard deviation of 0 would make any difference significant. The returned standard deviation
    is at least the standard deviation of the rounding error of multiples of `span / items`. `span`
    is 1 for accuracies. For rewards, `span` is the highest minus the lowest reward.
    """
    least = span / (items * math.sqrt(12))
    return np.asarray(np.maximum(np.std(differences, axis=-1, ddof=1), least))


def student_test(differences: Array, items: int, span: float = 1.0) -> Array:
    """Return the two-sided p-value of the paired t-test on `differences` [..., seeds].

    >>> float(student_test(np.array([0.10, 0.14, 0.12]), items=200).round(4))
    0.0091
    """
    seeds = differences.shape[-1]
    error = seed_deviation(differences, items, span) / math.sqrt(seeds)
    return np.asarray(2 * stats.t.sf(np.abs(differences.mean(axis=-1)) / error, seeds - 1))


def unseen_share(seeds: int, level: float = LEVEL) -> float:
    """Return the largest share of runs that `seeds` runs miss with probability `level / 2`.

    >>> round(unseen_share(3), 3), round(unseen_share(8), 3)
    (0.708, 0.369)
    """
    return 1 - float((level / 2) ** (1 / seeds))


def cancelling_share(first: Array, second: Array, bounds: Bounds = (0.0, 1.0)) -> Array:
    """Return the smallest share of unseen runs that would make the means of two arms equal.

    A run that no seed has shown can end anywhere within `bounds`: one of the better arm at the
    lower bound, and one of the worse arm at the upper bound.

    >>> float(cancelling_share(np.full(3, 0.8), np.full(3, 0.6)).round(4))  # 0.6 = 0.75 * 0.8
    0.25
    """
    a, b = first.mean(axis=-1), second.mean(axis=-1)
    low, high = bounds
    better, worse = np.maximum(a, b), np.minimum(a, b)
    # If both arms have the mean m, the better arm shows no such run with a probability of
    # (m - low) / (better - low), and the worse arm with (high - m) / (high - worse).
    m = np.clip((low + high) / 2, worse, better)
    room = (better - low) * (high - worse)
    return np.asarray(1 - (m - low) * (high - m) / np.where(room > 0, room, 1.0))


def rare_test(first: Array, second: Array, bounds: Bounds = (0.0, 1.0)) -> Array:
    """Return twice the largest probability that the seeds miss what would make the means equal.

    >>> a, b = np.full(3, 0.9), np.full(3, 0.1)
    >>> float(rare_test(a, b).round(4)), float(rare_test(a, b + 0.7).round(4))
    (0.0588, 1.0)
    """
    same = first.mean(axis=-1) == second.mean(axis=-1)
    missed = (1 - cancelling_share(first, second, bounds)) ** first.shape[-1]
    return np.where(same, 1.0, np.minimum(1.0, 2 * missed))


def _rare_low(first: Array, second: Array, bounds: Bounds, level: float) -> Array:
    """Return the lowest difference of the means with runs that the seeds miss by `level / 2`."""
    low, high = bounds
    a, b = first.mean(axis=-1) - low, high - second.mean(axis=-1)
    shown = 1 - unseen_share(first.shape[-1], level)
    # The arms show a share u and v of their runs; u * a + v * b is smallest where u * v = shown.
    u = np.clip(np.sqrt(shown * b / np.where(a > 0, a, 1.0)), shown, 1.0)
    return np.asarray(low - high + u * a + shown / u * b)


def seed_test(first: Array, second: Array, items: int, bounds: Bounds = (0.0, 1.0)) -> Array:
    """Return the p-value for equal means of two arms, from their means by seed [..., seeds].

    It is the larger one of two p-values: that of the paired t-test, which sees the variation that
    the seeds show, and that of `rare_test`, for what they do not show.
    """
    student = student_test(first - second, items, bounds[1] - bounds[0])
    return np.maximum(student, rare_test(first, second, bounds))


def seed_bounds(
    first: Array,
    second: Array,
    items: int,
    bounds: Bounds = (0.0, 1.0),
    level: float = LEVEL,
) -> tuple[Array, Array]:
    """Return the limits of the `1 - level` interval for the difference of the means of two arms.

    The interval excludes 0 if and only if the p-value of `seed_test` is below `level`.
    """
    seeds, span = first.shape[-1], bounds[1] - bounds[0]
    differences = first - second
    mean = differences.mean(axis=-1)
    half = _quantile(seeds - 1, level) * seed_deviation(differences, items, span) / seeds**0.5
    low = np.minimum(mean - half, _rare_low(first, second, bounds, level))
    high = np.maximum(mean + half, -_rare_low(second, first, bounds, level))
    return np.maximum(-span, low), np.minimum(span, high)


def sign_test(differences: Sequence[float]) -> float:
    """Return the p-value of the exact sign test over seeds, which assumes no distribution.

    Seeds without a difference are left out.

    >>> sign_test([0.1, 0.2, 0.1, 0.3, 0.1, -0.2])
    0.21875
    """
    signs = [value > 0 for value in differences if abs(value) > ROUNDING]
    return float(stats.binomtest(sum(signs), len(signs)).pvalue) if signs else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests by Holm's method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def power(effect: float, seeds: int, level: float = LEVEL, least: float = 0.0) -> float:
    """Return the power of the test over seeds for a difference of `effect` standard deviations.

    `least` is `least_difference` in standard deviations; without it, the power is that of the
    paired t-test. A significant difference with the wrong sign does not count as detected. The
    power is a mean of normal probabilities, one for each quantile of the observed standard
    deviation. A test with two seeds needs the far tail of the noncentral t distribution, where the
    usual series does not converge.
    """
    limits = _quantile(seeds - 1, level) * _observed_deviations(seeds - 1)
    limits = np.maximum(limits, least * math.sqrt(seeds))
    return float(special.ndtr(abs(effect) * math.sqrt(seeds) - limits).mean())


def least_difference(
    worse: float, seeds: int, bounds: Bounds = (0.0, 1.0), level: float = LEVEL
) -> float:
    """Return the smallest difference from an arm with the mean `worse` that `rare_test` accepts.

    If it leads beyond the bounds, `rare_test` accepts none.

    >>> round(least_difference(0.3, 8), 3), round(least_difference(0.6, 8), 3)
    (0.266, 0.351)
    """
    low, high = bounds
    shown, middle = 1 - unseen_share(seeds, level), (low + high) / 2
    better = high - shown * (high - worse)
    if worse >= middle:
        better = low + (worse - low) / shown
    elif better > middle:
        better = low + (middle - low) * (high - middle) / (shown * (high - worse))
    return better - worse


@cache
def _observed_deviations(freedom: int) -> Array:
    """Return quantiles of the ratio of the observed to the true standard deviation."""
    quantiles = (np.arange(2000) + 0.5) / 2000
    return np.asarray(np.sqrt(special.chdtri(freedom, 1 - quantiles) / freedom))


def seeds_needed(
    mean: float,
    deviation: float,
    level: float = LEVEL,
    worse: float | None = None,
    bounds: Bounds = (0.0, 1.0),
) -> int | None:
    """Return the number of seeds that the test over seeds needs for a power of 80 %.

    `worse` is the mean of the worse arm; without it, the number is that of the paired t-test.
    Return None if more than MOST_SEEDS seeds are needed.

    >>> seeds_needed(0.05, 0.05), seeds_needed(0.05, 0.05, worse=0.4), seeds_needed(0.0, 0.05)
    (10, 49, None)
    """

    def reached(seeds: int) -> float:
        least = 0.0 if worse is None else least_difference(worse, seeds, bounds, level)
        return power(mean / deviation, seeds, level, least / deviation)

    if reached(MOST_SEEDS) < POWER:
        return None
    counts = range(2, MOST_SEEDS + 1)
    return counts[bisect.bisect_left(counts, POWER, key=reached)]


def upper_deviation(deviation: float, seeds: int) -> float:
    """Return an upper confidence bound of the true standard deviation, at ASSURANCE."""
    freedom = seeds - 1
    return deviation * math.sqrt(freedom / float(special.chdtri(freedom, ASSURANCE)))


def detectable(
    first: Array,
    second: Array,
    items: int,
    bounds: Bounds = (0.0, 1.0),
    level: float = LEVEL,
) -> float:
    """Return a difference that the test over these seeds detects with at least 80 % power.

    The power holds with a probability of ASSURANCE, because it is computed from `upper_deviation`.
    A difference beyond the bounds means that none is detected.
    """
    seeds, span = len(first), bounds[1] - bounds[0]
    deviation = float(seed_deviation(first - second, items, span))
    deviation = upper_deviation(deviation, seeds)
    means = float(first.mean()), float(second.mean())
    # The true level of the worse arm is uncertain too; between two levels, the ends need the most.
    error = deviation / math.sqrt(seeds)
    levels = max(bounds[0], min(means) - error), min(bounds[1], max(means) + error)
    least = max(least_difference(each, seeds, bounds, level) for each in levels) / deviation

    def missing(difference: float) -> float:
        return power(difference / deviation, seeds, level, least) - POWER

    highest = deviation
    while missing(highest) < 0:
        highest *= 2
    return float(optimize.brentq(missing, 0.0, highest))


def area(budget: Sequence[float], values: Array, end: float) -> Array:
    """Return the mean of learning curves `values` [..., evaluations] up to `end`, by trapezoids.

    >>> float(area([0, 10, 20], np.array([0.0, 0.5, 0.5]), end=20))
    0.375
    """
    x, y = np.asarray(budget, dtype=float), np.asarray(values, dtype=float)
    if end <= x[0]:
        return np.asarray(y[..., 0])
    inside = int(np.searchsorted(x, end))  # evaluations before the end
    if inside < len(x):
        share = (end - x[inside - 1]) / (x[inside] - x[inside - 1])
        last = y[..., inside - 1] + share * (y[..., inside] - y[..., inside - 1])
    else:
        last = y[..., -1]
    x, y = np.append(x[:inside], end), np.append(y[..., :inside], last[..., None], axis=-1)
    return np.asarray(np.trapezoid(y, x, axis=-1) / (end - x[0]))


def reached(axis: Sequence[float], accuracies: Sequence[float], level: float) -> float:
    """Return the x value at which a curve first reaches `level`, by interpolation.

    Return infinity if the curve never reaches `level`.

    >>> reached([0, 10, 20], [0.1, 0.1, 0.3], 0.2), reached([0, 10], [0.1, 0.2], 0.5)
    (15.0, inf)
    """
    for index, value in enumerate(accuracies):
        if value >= level - ROUNDING:
            if index == 0:
                return float(axis[0])
            before = accuracies[index - 1]
            share = min(1.0, (level - before) / (value - before))
            return float(axis[index - 1] + share * (axis[index] - axis[index - 1]))
    return math.inf


def fell(before: Array, final: Array) -> bool:
    """Return whether the evaluation `final` solves significantly fewer prompts than `before`."""
    found = paired_difference(final.tolist(), before.tolist())
    return found.estimate.value < 0 and found.p_value < COLLAPSE_LEVEL
