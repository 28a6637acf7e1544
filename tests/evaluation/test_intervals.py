from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from covey.evaluation.intervals import (
    likely_bounds,
    mean_over_prompts,
    paired_difference,
    pass_at_k,
    proportion,
)


# Newcombe 1998, Statistics in Medicine 17, table I, method 5.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2527, 0.3676),
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_proportions_have_the_published_exact_intervals(
    successes: int, trials: int, low: float, high: float
) -> None:
    estimate = proportion(successes, trials)
    assert estimate.value == successes / trials
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5.1e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@settings(deadline=None)
def test_an_interval_of_a_proportion_is_exact_and_mirrors_that_of_the_failures(
    counts: tuple[int, int],
) -> None:
    successes, trials = counts
    estimate, mirrored = proportion(successes, trials), proportion(trials - successes, trials)
    exact = stats.binomtest(successes, trials).proportion_ci(method="exact")
    assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
    assert (estimate.low, estimate.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_one(samples: int) -> None:
    for correct in range(samples + 1):
        answers = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in combinations(answers, k)]
            share = sum(subsets) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


counts = st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(counts)
@settings(deadline=None)
def test_pass_at_1_is_the_mean(counts: tuple[int, int]) -> None:
    samples, correct = counts
    assert pass_at_k(samples, correct, 1) == pytest.approx(correct / samples, abs=1e-12)


@given(counts)
@settings(max_examples=30, deadline=None)
def test_pass_at_k_rises_with_k_from_the_mean_to_whether_any_is_correct(
    counts: tuple[int, int],
) -> None:
    samples, correct = counts
    values = [pass_at_k(samples, correct, k) for k in range(1, samples + 1)]
    assert values == sorted(values)
    assert values[-1] == float(correct > 0)
    assert all(0.0 <= value <= 1.0 for value in values)


@pytest.mark.parametrize("k", [0, -1, 9])
def test_k_beyond_the_samples_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match="must lie between 1 and the 8 samples"):
        pass_at_k(8, 4, k)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_an_interval_holds_the_mean_and_stays_within_the_bounds(
    values: list[float], seed: int
) -> None:
    estimate = mean_over_prompts(values, seed)
    slack = 1e-12
    assert estimate.value == pytest.approx(sum(values) / len(values))
    assert 0.0 <= estimate.low <= estimate.value + slack
    assert estimate.value - slack <= estimate.high <= 1.0 + slack
    assert estimate.high - estimate.low > 1e-3


def test_a_mean_of_equal_values_is_not_certain() -> None:
    estimate = mean_over_prompts([0.25] * 7)
    unseen = 1 - 0.025 ** (1 / 7)
    assert estimate.value == 0.25
    assert (estimate.low, estimate.high) == pytest.approx(
        (0.25 - 0.25 * unseen, 0.25 + 0.75 * unseen)
    )


def test_the_same_values_have_the_same_interval_by_any_name() -> None:
    values = [1.0] * 18 + [0.0] * 82
    assert mean_over_prompts(values) == mean_over_prompts(values, bounds=(0.0, 1.0))
    assert mean_over_prompts(values) == proportion(18, 100)


def test_unknown_bounds_are_0_and_1_or_lie_beyond_the_values() -> None:
    assert likely_bounds([0.2, 0.4]) == (0.0, 1.0)
    assert likely_bounds([-1.0, 0.4]) == (-2.0, 1.0)
    assert likely_bounds([0.0, 3.0]) == (0.0, 4.5)


def test_an_interval_has_the_width_of_the_normal_approximation() -> None:
    estimate = mean_over_prompts([0.25, 0.75] * 200)
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - 0.0265, 0.5 + 0.0265), abs=0.0015)


def test_an_interval_shrinks_with_the_root_of_the_prompts() -> None:
    values = np.random.default_rng(1).random(25)
    widths = []
    for repeats in (1, 4, 16, 64):
        estimate = mean_over_prompts([float(v) for v in np.tile(values, repeats)])
        widths.append(estimate.high - estimate.low)
    ratios = [narrow / wide for wide, narrow in pairwise(widths)]
    assert ratios == pytest.approx([0.5, 0.5, 0.5], abs=0.1)


def test_the_same_seed_gives_the_same_interval_and_another_a_similar_one() -> None:
    values = [float(v) for v in np.random.default_rng(2).random(100)]
    first, again, other = (mean_over_prompts(values, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert (other.low, other.high) == pytest.approx((first.low, first.high), abs=0.01)


def test_one_prompt_says_little_about_others() -> None:
    estimate = mean_over_prompts([0.3])
    assert (estimate.low, estimate.high) == pytest.approx((0.3 - 0.975 * 0.3, 0.3 + 0.975 * 0.7))
    estimate = mean_over_prompts([0.0, 1.0])
    assert (estimate.low, estimate.high) == pytest.approx((0.0126, 0.9874), abs=1e-4)


@pytest.mark.parametrize("prompts", [20, 60])
def test_an_interval_covers_the_true_mean_at_least_95_times_in_100(prompts: int) -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(400):
        # Mean accuracies of prompts of very different difficulty, four samples each.
        difficulty = generator.beta(0.7, 0.7, prompts)
        values = generator.binomial(4, difficulty) / 4
        estimate = mean_over_prompts([float(v) for v in values], seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.935 <= covered / 400 <= 0.995


@pytest.mark.parametrize("prompts", [20, 50, 200])
def test_the_exact_interval_covers_at_least_95_times_in_100_for_every_proportion(
    prompts: int,
) -> None:
    # Exactly, without drawing: over a grid of true proportions, each count by its probability.
    intervals = [proportion(count, prompts) for count in range(prompts + 1)]
    truths = np.linspace(0.002, 0.998, 250)
    covered = [
        sum(
            stats.binom.pmf(count, prompts, truth)
            for count, e in enumerate(intervals)
            if e.low <= truth <= e.high
        )
        for truth in truths
    ]
    assert min(covered) >= 0.95
    assert np.mean(covered) < 0.99


@pytest.mark.parametrize(
    ("prompts", "gain", "loss"), [(20, 0.3, 0.15), (40, 0.2, 0.2), (100, 0.15, 0.05)]
)
def test_a_paired_interval_covers_the_true_difference_about_95_times_in_100(
    prompts: int, gain: float, loss: float
) -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(400):
        kinds = generator.choice(4, prompts, p=[gain, loss, 0.3, 0.7 - gain - loss])
        first, second = np.isin(kinds, (0, 2)), np.isin(kinds, (1, 2))
        estimate = paired_difference(first.tolist(), second.tolist(), seed=trial).estimate
        covered += estimate.low - 1e-9 <= gain - loss <= estimate.high + 1e-9
    assert 0.935 <= covered / 400 <= 0.995


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=50)
def test_the_p_value_is_that_of_mcnemars_exact_test(pairs: list[tuple[bool, bool]]) -> None:
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = paired_difference(first, second)
    gained = sum(a and not b for a, b in pairs)
    lost = sum(b and not a for a, b in pairs)
    assert (found.gained, found.lost) == (gained, lost)
    # Twice the smaller tail of fair coins, at most 1.
    tail = stats.binom.cdf(min(gained, lost), gained + lost, 0.5)
    assert found.p_value == pytest.approx(min(1.0, 2 * tail), abs=1e-12)
    assert found.estimate.value == pytest.approx((gained - lost) / len(pairs))
    mirrored = paired_difference(second, first)
    assert mirrored.p_value == pytest.approx(found.p_value)
    assert mirrored.estimate.value == -found.estimate.value


def test_a_difference_on_the_same_prompts_is_known_better_than_the_values() -> None:
    second = [0.0, 1.0] * 50
    first = [1.0, 1.0] * 8 + second[16:]
    paired = paired_difference(first, second).estimate
    apart = proportion(58, 100)
    assert paired.value == pytest.approx(0.08)
    assert paired.low > 0.0
    assert paired.high - paired.low < 0.7 * (apart.high - apart.low)


def test_means_that_are_equal_but_for_rounding_are_equal() -> None:
    found = paired_difference([0.1 + 0.2, 0.5], [0.3, 0.5])
    assert (found.gained, found.lost, found.p_value) == (0, 0, 1.0)


def test_values_that_are_no_pairs_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 and 3 values are not pairs"):
        paired_difference([0.0, 1.0], [0.0, 1.0, 1.0])


@given(st.integers(1, 400))
@settings(deadline=None, max_examples=30)
def test_equal_shares_have_the_interval_of_a_proportion(count: int) -> None:
    for value in (0.0, 1.0):
        found = mean_over_prompts([value] * count, bounds=(0.0, 1.0))
        expected = proportion(int(value) * count, count)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    same = paired_difference([1.0] * count, [1.0] * count).estimate
    assert same.low == -same.high < 0.0
