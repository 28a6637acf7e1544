from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from covey.evaluation.intervals import proportion
from covey.lab.compare.statistics import (
    accuracy,
    accuracy_bounds,
    area,
    change,
    crossed,
    detectable,
    fell,
    half_width,
    holm,
    least_difference,
    mean_reward,
    power,
    rare_test,
    reached,
    seed_bounds,
    seed_test,
    seeds_needed,
    sign_test,
    student_test,
    unseen_share,
    upper_deviation,
)

PROMPTS = 128


def drawn(
    repetitions: int,
    seeds: int,
    *,
    mean: float = 0.2,
    training: float = 0.3,
    preference: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """Simulate whether completions [repetitions, seeds, prompts] of repeated runs are correct.

    A completion is correct if ability exceeds difficulty, in units of a normal deviate. Prompts
    vary (1.5), training runs vary (`training`: 8 points of accuracy), and so do the completions of
    a run (0.8). `preference` is how much easier some prompts are for this arm than for others.
    `seed` selects the arm; difficulties are the same for all.
    """
    shape = (repetitions, 1, PROMPTS)
    difficulty = np.random.default_rng(12345).normal(0, 1.5, shape).astype(np.float32)
    own = np.random.default_rng(seed)
    ability = mean + training * own.normal(size=(repetitions, seeds, 1))
    own_ease = preference * own.normal(size=shape)
    noise = 0.8 * own.standard_normal((repetitions, seeds, PROMPTS), dtype=np.float32)
    return ability + own_ease + noise > difficulty


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("training", [0.1, 0.3])
def test_false_alarm_rate_is_the_level(seeds: int, training: float) -> None:
    one, other = (drawn(4000, seeds, training=training, seed=arm) for arm in (1, 2))
    differences = one.mean(axis=-1) - other.mean(axis=-1)
    alarms = (student_test(differences, PROMPTS) < 0.05).mean()
    assert 0.035 <= alarms <= 0.065


def test_a_test_over_prompts_of_one_seed_has_30_percent_false_alarms() -> None:
    one, other = (drawn(2000, 1, seed=arm)[:, 0] for arm in (1, 2))
    gained, lost = (one & ~other).sum(axis=-1), (other & ~one).sum(axis=-1)
    p_values = 2 * stats.binom.cdf(np.minimum(gained, lost), gained + lost, 0.5)
    assert (p_values < 0.05).mean() > 0.3


@pytest.mark.parametrize(
    ("seeds", "shift", "rate"), [(2, 1.0, 0.15), (3, 0.8, 0.40), (5, 0.6, 0.60)]
)
def test_power_matches_simulated_comparisons(seeds: int, shift: float, rate: float) -> None:
    one, other = drawn(4000, seeds, mean=shift, seed=1), drawn(4000, seeds, mean=0.0, seed=2)
    differences = one.mean(axis=-1) - other.mean(axis=-1)
    found = (student_test(differences, PROMPTS) < 0.05) & (differences.mean(axis=-1) > 0)
    effect = differences.mean() / differences.std(axis=-1, ddof=1).mean()
    effect *= _bias(seeds)
    assert found.mean() == pytest.approx(power(effect, seeds), abs=0.03)
    assert found.mean() == pytest.approx(rate, abs=0.04)


def _bias(seeds: int) -> float:
    """Return the factor by which the mean deviation of few values underestimates the true one."""
    freedom = seeds - 1
    return math.sqrt(2 / freedom) * math.exp(math.lgamma(seeds / 2) - math.lgamma(freedom / 2))


# True accuracies by the normal distribution of ability + noise - difficulty.
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize(("mean", "training"), [(0.2, 0.05), (0.2, 0.3), (0.2, 0.8), (2.5, 0.8)])
def test_interval_of_an_arm_covers_its_accuracy_over_seeds_and_prompts(
    seeds: int, mean: float, training: float
) -> None:
    truth = stats.norm.cdf(mean / math.sqrt(1.5**2 + 0.8**2 + training**2))
    _, low, high = accuracy_bounds(drawn(2000, seeds, mean=mean, training=training, seed=3))
    assert 0.935 <= ((low <= truth) & (truth <= high)).mean() <= 0.992


def test_interval_over_seeds_alone_is_too_narrow() -> None:
    truth = stats.norm.cdf(0.2 / math.sqrt(1.5**2 + 0.8**2 + 0.05**2))
    by_seed = drawn(2000, 5, training=0.05, seed=3).mean(axis=-1)
    half = 2.776 * by_seed.std(axis=-1, ddof=1) / math.sqrt(5)
    assert (np.abs(by_seed.mean(axis=-1) - truth) <= half).mean() < 0.75


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_interval_for_new_prompts_covers_if_arms_prefer_different_prompts(
    seeds: int,
) -> None:
    one, other = (
        drawn(2000, seeds, mean=0.0, preference=1.0, training=0.1, seed=a) for a in (1, 2)
    )
    values = one.astype(float) - other
    parts = crossed(values)
    covered = (np.abs(parts.mean) <= half_width(parts, seeds, PROMPTS)).mean()
    assert 0.94 <= covered <= 0.99


def test_on_the_same_prompts_a_preference_is_a_true_difference() -> None:
    # Hence a summary says when it holds for these held-out prompts only.
    one, other = (drawn(2000, 5, mean=0.0, preference=1.0, training=0.1, seed=a) for a in (1, 2))
    differences = one.mean(axis=-1) - other.mean(axis=-1)
    assert (student_test(differences, PROMPTS) < 0.05).mean() > 0.1


def test_variance_components_match_the_analysis_of_variance() -> None:
    values = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    parts = crossed(values)
    # Degrees of freedom: 2 between seeds, 3 between prompts, 6 for the rest.
    total = ((values - 0.5) ** 2).sum()
    by_seed = 4 * ((values.mean(axis=1) - 0.5) ** 2).sum()
    by_item = 3 * ((values.mean(axis=0) - 0.5) ** 2).sum()
    rest = total - by_seed - by_item
    assert (total, by_seed, by_item, rest) == pytest.approx((3.0, 0.5, 5 / 3, 5 / 6))
    assert parts.mean == 0.5
    assert parts.over_seeds == pytest.approx(by_seed / 2 / 12)
    assert parts.over_items == pytest.approx((by_item / 3 - rest / 6) / 12)


def test_identical_runs_have_the_interval_over_prompts() -> None:
    correct = np.array([[True] * 30 + [False] * 70] * 4)
    estimate = accuracy(correct)
    # Student's quantile for 99 degrees of freedom in place of the normal's.
    wilson = proportion(30, 100)
    assert (estimate.low, estimate.high) == pytest.approx((wilson.low, wilson.high), abs=0.003)
    assert accuracy(correct[:1]) == wilson


@pytest.mark.parametrize("correct", [True, False])
def test_interval_of_accuracy_0_or_1_has_a_width(correct: bool) -> None:
    estimate = accuracy(np.full((3, 50), correct))
    wilson = proportion(50 * correct, 50)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (float(correct), wilson.low, wilson.high), abs=1e-9
    )


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 10**6))
def test_an_accuracy_lies_in_its_interval_between_0_and_1(
    seeds: int, items: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    estimate = accuracy(generator.random((seeds, items)) < generator.random())
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0


def test_interval_of_a_change_of_one_seed_is_over_prompts() -> None:
    values = np.array([[1.0] * 6 + [0.0] * 14])
    assert change(values).value == 0.3
    assert 0.0 < change(values).low < 0.2 < 0.4 < change(values).high < 0.6
    both = change(np.concatenate([values, values]))
    assert (both.low, both.high) == pytest.approx((0.3 - 0.22, 0.3 + 0.22), abs=0.005)


counts = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=2, max_size=8)


@given(counts, st.sampled_from([0.05, 0.05 / 6]))
def test_an_interval_excludes_0_if_and_only_if_the_test_is_significant(
    counts: list[tuple[int, int]], level: float
) -> None:
    a, b = np.array(counts).T / 100
    p_value = float(seed_test(a, b, 100))
    low, high = seed_bounds(a, b, 100, level=level)
    assert 0.0 <= p_value <= 1.0
    assert -1.0 <= low <= high <= 1.0
    if abs(p_value - level) > 1e-9:
        assert (p_value < level) == (not low <= 0.0 <= high)
    assert float(seed_test(b, a, 100)) == pytest.approx(p_value)
    student = float(student_test(a - b, 100))
    if len(set((a - b).round(9))) > 1:
        assert student == pytest.approx(stats.ttest_1samp(a - b, 0.0).pvalue, rel=1e-6)
    assert p_value == max(student, float(rare_test(a, b)))


@pytest.mark.parametrize("seeds", [8, 12])
def test_seeds_miss_the_unseen_share_with_a_probability_of_2_5_percent(seeds: int) -> None:
    share = unseen_share(seeds)
    assert (1 - share) ** seeds == pytest.approx(0.025)
    # An arm at 80 % that collapses to 0 in this share of its runs is as good as a steady arm at
    # the mean, and the seeds show no collapse: p is twice that probability.
    a, b = np.full(seeds, 0.8), np.full(seeds, 0.8 * (1 - share))
    assert rare_test(a, b) == pytest.approx(0.05)
    assert rare_test(1 - a, 1 - b) == pytest.approx(0.05)  # one takes off in as many runs


@pytest.mark.parametrize("worse", [0.0, 0.1, 0.3, 0.5, 0.6])
def test_the_least_difference_is_what_the_rare_test_accepts(worse: float) -> None:
    for seeds in (8, 20):
        least = least_difference(worse, seeds)
        if worse + least <= 1:
            a, b = np.full(seeds, worse + least), np.full(seeds, worse)
            assert rare_test(a, b) == pytest.approx(0.05)


def test_equal_differences_have_the_deviation_of_rounding() -> None:
    assert student_test(np.zeros(3), 100) == 1.0
    # Two seeds, both one prompt of 100 better: t = 1 * sqrt(12) * sqrt(2), one degree of freedom.
    p_value = 2 * stats.t.sf(math.sqrt(24), 1)
    assert student_test(np.array([0.01, 0.01]), 100) == pytest.approx(p_value)
    assert p_value == pytest.approx(0.128, abs=5e-4)
    assert student_test(np.array([0.3, 0.3]), 100) < 0.01


@pytest.mark.parametrize(
    ("values", "p_value"),
    [
        ([1, 1, 1, 1, 1], 2 / 32),
        ([1, 1, 1, 1, 1, 1], 2 / 64),
        ([9, 1, 1, 1, 1, -1], 14 / 64),
        ([0, 0, 3], 1.0),
        ([0, 0, 0, 0, 0, 0], 1.0),
    ],
)
def test_sign_test_counts_seeds(values: list[float], p_value: float) -> None:
    assert sign_test([0.01 * v for v in values]) == pytest.approx(p_value)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_none_and_bonferroni(
    p_values: list[float],
) -> None:
    corrected = holm(p_values)
    assert all(
        p <= c <= min(1.0, p * len(p_values)) for p, c in zip(p_values, corrected, strict=True)
    )
    assert corrected[p_values.index(min(p_values))] == min(1.0, min(p_values) * len(p_values))
    order = np.argsort(p_values, kind="stable")
    assert sorted(corrected) == [corrected[i] for i in order]


# Numbers of pairs from Cohen's tables of the paired t-test (two-sided 5 %, 80 %).
@pytest.mark.parametrize(
    ("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (9.0, 3)]
)
def test_seeds_needed_match_cohens_tables(effect: float, pairs: int) -> None:
    assert seeds_needed(effect * 0.04, 0.04) == pairs
    assert seeds_needed(-effect * 0.04, 0.04) == pairs


def test_no_number_of_seeds_detects_a_zero_difference() -> None:
    assert seeds_needed(0.0, 0.04) is None
    assert seeds_needed(0.0001, 0.04) is None
    assert power(0.0, 5) == pytest.approx(0.025, abs=1e-3)


@pytest.mark.parametrize("seeds", [3, 5, 20])
@pytest.mark.parametrize("level", [0.05, 0.05 / 6])
def test_detectable_difference_has_its_power_at_the_upper_bound_of_the_deviation(
    seeds: int, level: float
) -> None:
    steps = np.linspace(-0.03, 0.03, seeds)
    a, b = 0.5 + steps, np.full(seeds, 0.5)
    least = detectable(a, b, 128, level=level)
    deviation = upper_deviation(float(steps.std(ddof=1)), seeds)
    assert deviation == pytest.approx(
        steps.std(ddof=1) * math.sqrt((seeds - 1) / stats.chi2.ppf(0.1, seeds - 1))
    )
    error = deviation / math.sqrt(seeds)
    rare = max(least_difference(end, seeds, level=level) for end in (0.5 - error, 0.5 + error))
    assert power(least / deviation, seeds, level, rare / deviation) == pytest.approx(0.8, abs=1e-6)
    limit = stats.t.ppf(1 - level / 2, seeds - 1)
    exact = stats.nct.sf(limit, seeds - 1, least / deviation * math.sqrt(seeds))
    assert exact >= 0.8 - 1e-3  # what the t-test alone would detect


@pytest.mark.parametrize(
    ("end", "value"),
    [(20, 0.375), (10, 0.25), (5, 0.125), (15, 1 / 3), (0, 0.0)],
)
def test_an_area_is_the_mean_accuracy_up_to_the_common_end(end: float, value: float) -> None:
    assert area([0, 10, 20], np.array([0.0, 0.5, 0.5]), end) == pytest.approx(value)


@pytest.mark.parametrize(
    ("level", "place"),
    [(0.1, 0.0), (0.15, 5.0), (0.2, 10.0), (0.3, 25.0), (0.4, 30.0), (0.41, math.inf)],
)
def test_a_level_is_reached_where_the_curve_first_crosses_it(level: float, place: float) -> None:
    found = reached([0, 10, 20, 30, 40], [0.1, 0.2, 0.2, 0.4, 0.3], level)
    assert found == pytest.approx(place)


def test_an_area_is_computed_for_each_prompt() -> None:
    solved = np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
    found = area([0, 10, 20], solved, end=15)
    assert found == pytest.approx([2 / 3, 1 / 12, 0.0, 1.0])
    one = accuracy(found[None])  # a single seed has an interval over prompts
    assert one.value == pytest.approx(found.mean())
    assert 0.0 < one.low < one.value < one.high < 1.0


def test_a_mean_reward_of_equal_values_has_an_interval_with_a_width() -> None:
    for seeds in (1, 3):
        estimate = mean_reward(np.full((seeds, 40), 1.0))
        assert (estimate.value, estimate.high) == (1.0, 1.0)
        assert estimate.low == pytest.approx(0.025 ** (1 / 40))
        same = change(np.zeros((seeds, 40)))
        assert same.low == -same.high == pytest.approx(0.025 ** (1 / 40) - 1)


def test_fall_must_exceed_chance() -> None:
    before = np.array([True] * 12 + [False] * 20)
    few, many = before.copy(), before.copy()
    few[:7], many[:8] = False, False  # p = 2 / 2^7 = 1.6 % and 2 / 2^8 = 0.8 %
    assert (fell(before, few), fell(before, many), fell(many, before)) == (False, True, False)
