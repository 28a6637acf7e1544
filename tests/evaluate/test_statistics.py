from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.evaluate.statistics import mean_over_prompts, pass_at_k, proportion


# Newcombe 1998, Statistics in Medicine 17, table I, method 3; 10 of 20 from Wilson's formula.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 20, 0.2993, 0.7007),
    ],
)
def test_proportions_have_the_published_wilson_intervals(
    successes: int, trials: int, low: float, high: float
) -> None:
    estimate = proportion(successes, trials)
    assert estimate.value == successes / trials
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5.1e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@settings(deadline=None)
def test_an_interval_of_a_proportion_is_wilsons_and_mirrors_that_of_the_failures(
    counts: tuple[int, int],
) -> None:
    successes, trials = counts
    estimate, mirrored = proportion(successes, trials), proportion(trials - successes, trials)
    z, p = 1.959963984540054, successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * np.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    assert (estimate.low, estimate.high) == pytest.approx((centre - half, centre + half), abs=1e-9)
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
    assert (estimate.low, estimate.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(samples: int) -> None:
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
def test_pass_at_k_rises_with_k_from_the_mean_to_whether_any_is_right(
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
def test_a_bootstrap_interval_holds_the_mean_and_stays_within_the_values(
    values: list[float], seed: int
) -> None:
    estimate = mean_over_prompts(values, seed)
    slack = 1e-12
    assert estimate.value == pytest.approx(sum(values) / len(values))
    assert min(values) - slack <= estimate.low <= estimate.value + slack
    assert estimate.value - slack <= estimate.high <= max(values) + slack


def test_a_mean_of_equal_values_is_certain() -> None:
    estimate = mean_over_prompts([0.25] * 7)
    assert (estimate.value, estimate.low, estimate.high) == (0.25, 0.25, 0.25)


def test_a_bootstrap_interval_has_the_width_of_the_normal_approximation() -> None:
    estimate = mean_over_prompts([0.0, 1.0] * 200)
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=0.003)


def test_a_bootstrap_interval_shrinks_with_the_root_of_the_prompts() -> None:
    values = np.random.default_rng(1).random(25)
    widths = []
    for repeats in (1, 4, 16, 64):
        estimate = mean_over_prompts([float(v) for v in np.tile(values, repeats)])
        widths.append(estimate.high - estimate.low)
    ratios = [narrow / wide for wide, narrow in pairwise(widths)]
    assert ratios == pytest.approx([0.5, 0.5, 0.5], abs=0.04)


def test_the_same_seed_gives_the_same_interval_and_another_a_similar_one() -> None:
    values = [float(v) for v in np.random.default_rng(2).random(100)]
    first, again, other = (mean_over_prompts(values, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert (other.low, other.high) == pytest.approx((first.low, first.high), abs=0.01)


def test_a_bootstrap_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(500):
        # Mean accuracies of 60 prompts, four samples each, of very different difficulty.
        difficulty = generator.beta(0.7, 0.7, 60)
        values = generator.binomial(4, difficulty) / 4
        estimate = mean_over_prompts([float(v) for v in values], seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 500 <= 0.97
