"""Statistical tests, intervals and power analysis for runs with several seeds.

Every seed is measured on the same held-out prompts, so seeds and prompts are crossed factors.
Arrays have the shape [seeds] or [seeds, prompts]. To simulate many experiments at once, arrays can
have additional leading axes. See docs/statistics.md for the reasons for these tests and intervals,
and for their error rates.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from covey.evaluation.intervals import (
    CONFIDENCE,
    ROUNDING,
    Estimate,
    mean_over_prompts,
    of_equal_values,
    paired_difference,
    proportion,
)

Array = NDArray[Any]

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 1000
"""The largest number of seeds that `seeds_needed` considers."""
EXACT_FLIPS = 16
"""The largest number of seeds for which the sign flip test tries all `2 ** seeds` sign
combinations. With more than EXACT_FLIPS seeds, the sign flip test tries `2 ** 16` random
combinations.
"""
FEW_SEEDS = 3
"""The smallest number of seeds that is enough to rank two arms. With two seeds, the confidence
interval is too wide to rank arms."""
FLIP_SEEDS = 6
"""The smallest number of seeds with which the sign flip test can reach a p-value below 5 %. With
five seeds, the lowest possible p-value is 6.25 %.
"""
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


def half_width(parts: Crossed, seeds: int, items: int) -> Array:
    """Return the half-width of the 95 % confidence interval of a mean over seeds and prompts.

    Each variance component is multiplied by the squared t quantile for its own degrees of freedom.
    With two seeds, the t quantile is 12.7 for the variance between seeds, but about 2 for the
    variance between prompts.
    """
    width = _quantile(seeds - 1) ** 2 * parts.over_seeds
    if items > 1:
        width = width + _quantile(items - 1) ** 2 * parts.over_items
    return np.asarray(np.sqrt(width))


def _quantile(freedom: int) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def accuracy_bounds(values: Array) -> tuple[Array, Array, Array]:
    """Return the mean accuracy, and the lower and the upper bound of its confidence interval.

    `values` [..., seeds, prompts] contains the accuracies of at least two seeds. The bounds come
    from Wilson's interval, which stays within [0, 1] and never has width 0. The sample size of the
    interval is the number of independent completions that would give the same standard error.
    """
    seeds, items = values.shape[-2:]
    parts = crossed(values)
    scatter = parts.mean * (1 - parts.mean)
    # If every completion is correct, there is no variance: take Wilson's interval for `items`
    # prompts.
    none = stats.norm.ppf((1 + CONFIDENCE) / 2) ** 2 / items
    half = half_width(parts, seeds, items)
    known = (half > 0) & (scatter > 0)
    share = np.where(known, half**2 / np.where(known, scatter, 1.0), none)
    centre = (parts.mean + share / 2) / (1 + share)
    half = np.sqrt(share * scatter + share**2 / 4) / (1 + share)
    low, high = np.maximum(0.0, centre - half), np.minimum(1.0, centre + half)
    return parts.mean, np.minimum(low, parts.mean), np.maximum(high, parts.mean)


def accuracy(correct: Array) -> Estimate:
    """Estimate the accuracy of one arm of a comparison from `correct` [seeds, prompts].

    With a single seed, the confidence interval covers the choice of prompts but not the choice of
    seeds.
    """
    if len(correct) == 1:
        return proportion(int(correct.sum()), correct.shape[1])
    return Estimate(*(float(value) for value in accuracy_bounds(correct)))


def change(values: Array, limit: float = 1.0) -> Estimate:
    """Return the mean of the differences `values` [seeds, prompts], with its confidence interval.

    `limit` is the largest possible difference: 1 for accuracies, infinite for rewards.
    """
    bounds = (-limit, limit) if math.isfinite(limit) else None
    if len(values) == 1:
        return mean_over_prompts(values[0].tolist(), bounds=bounds)
    parts = crossed(values)
    mean, half = float(parts.mean), float(half_width(parts, *values.shape))
    if half <= ROUNDING:
        return of_equal_values(mean, values.shape[1], bounds)
    return Estimate(mean, max(-limit, mean - half), min(limit, mean + half))


def mean_reward(values: Array) -> Estimate:
    """Return the mean of rewards [seeds, prompts], with its confidence interval."""
    return change(values, limit=math.inf)


def seed_deviation(differences: Array, items: int, span: float = 1.0) -> Array:
    """Return the standard deviation of per-seed differences [..., seeds].

    With n prompts, accuracies are multiples of `1 / n`, so two seeds often have equal differences.
    A standard deviation of 0 would make any difference significant. The returned standard deviation
    is at least the standard deviation of the rounding error of multiples of `span / items`. `span`
    is 1 for accuracies. For rewards, `span` is the highest minus the lowest reward.
    """
    least = span / (items * math.sqrt(12))
    return np.asarray(np.maximum(np.std(differences, axis=-1, ddof=1), least))


def seed_test(differences: Array, items: int, span: float = 1.0) -> Array:
    """Return the two-sided p-value of the paired t-test on `differences` [..., seeds].

    >>> float(seed_test(np.array([0.10, 0.14, 0.12]), items=200).round(4))
    0.0091
    """
    seeds = differences.shape[-1]
    error = seed_deviation(differences, items, span) / math.sqrt(seeds)
    return np.asarray(2 * stats.t.sf(np.abs(differences.mean(axis=-1)) / error, seeds - 1))


def seed_interval(
    differences: Array, items: int, span: float = 1.0, limit: float = 1.0
) -> Estimate:
    """Return the mean difference, with the confidence interval of the paired t-test."""
    seeds = len(differences)
    error = float(seed_deviation(differences, items, span)) / math.sqrt(seeds)
    mean, half = float(differences.mean()), _quantile(seeds - 1) * error
    return Estimate(mean, max(-limit, mean - half), min(limit, mean + half))


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds, with Student's t interval.

    With a single seed, the interval has width 0.
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, mean, mean)
    half = _quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def sign_flip_test(differences: Sequence[float]) -> float | None:
    """Return the p-value of the two-sided sign flip test over seeds.

    If the arms are equally good, each seed's difference is equally likely to be positive or
    negative. The p-value is the fraction of sign combinations whose sum is at least as far from 0
    as the observed sum. With fewer than six seeds, return None, because no p-value could be below
    5 %.

    >>> sign_flip_test([0.1, 0.2, 0.1, 0.3, 0.1, 0.2])
    0.03125
    """
    seeds = len(differences)
    if seeds < FLIP_SEEDS:
        return None
    if seeds <= EXACT_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=seeds)))
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), (2**EXACT_FLIPS - 1, seeds))
        signs = np.vstack([np.ones(seeds), drawn])  # always include the observed signs
    sums = np.abs(signs @ np.asarray(differences, dtype=float))
    return float((sums >= sums[0] - ROUNDING).mean())


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


def power(effect: float, seeds: int, level: float = LEVEL) -> float:
    """Return the power of the paired t-test for a difference of `effect` standard deviations.

    A significant difference with the wrong sign does not count as detected. The power is a mean of
    normal probabilities, one for each quantile of the observed standard deviation. A test with two
    seeds needs the far tail of the noncentral t distribution, where the usual series does not
    converge.
    """
    limit = stats.t.ppf(1 - level / 2, seeds - 1)
    shifts = abs(effect) * math.sqrt(seeds) - limit * _observed_deviations(seeds - 1)
    return float(special.ndtr(shifts).mean())


@cache
def _observed_deviations(freedom: int) -> Array:
    """Return quantiles of the ratio of the observed to the true standard deviation."""
    quantiles = (np.arange(2000) + 0.5) / 2000
    return np.asarray(np.sqrt(special.chdtri(freedom, 1 - quantiles) / freedom))


def seeds_needed(mean: float, deviation: float, level: float = LEVEL) -> int | None:
    """Return the number of seeds that the paired t-test needs for a power of 80 %.

    Return None if more than MOST_SEEDS seeds are needed.

    >>> seeds_needed(0.05, 0.05), seeds_needed(0.0, 0.05)
    (10, None)
    """
    effect = mean / deviation
    if power(effect, MOST_SEEDS, level) < POWER:
        return None
    counts = range(2, MOST_SEEDS + 1)
    return counts[bisect.bisect_left(counts, POWER, key=lambda n: power(effect, n, level))]


def detectable(deviation: float, seeds: int, level: float = LEVEL) -> float:
    """Return the smallest difference that a test with `seeds` seeds detects with 80 % power."""
    highest = 1.0
    while power(highest, seeds, level) < POWER:
        highest *= 2
    effect = optimize.brentq(lambda e: power(e, seeds, level) - POWER, 0.0, highest)
    return float(effect) * deviation


def area(budget: Sequence[float], accuracies: Sequence[float], end: float) -> float:
    """Return the mean accuracy of a learning curve up to `end`, as its area divided by its width.

    >>> area([0, 10, 20], [0.0, 0.5, 0.5], end=20)
    0.375
    """
    x, y = np.asarray(budget, dtype=float), np.asarray(accuracies, dtype=float)
    if end <= x[0]:
        return float(y[0])
    inside = x < end
    x, y = np.append(x[inside], end), np.append(y[inside], np.interp(end, x, y))
    return float(np.trapezoid(y, x) / (end - x[0]))


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
