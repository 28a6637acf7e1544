from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import stats

from covey.errors import RunError
from covey.evaluation.intervals import proportion
from covey.lab.compare.comparison import (
    Arm,
    Comparison,
    Point,
    RunResult,
    compared_by,
    with_metric,
)
from covey.lab.compare.conclusion import Conclusion, PairResult, conclude
from covey.lab.compare.statistics import holm, seeds_needed
from covey.lab.compare.tables import (
    checkpoint_table,
    pair_table,
    result_table,
    reward_table,
    speed_table,
    training_table,
)

ITEMS = 100
START = 20


def solved(count: int, shift: int = 0) -> dict[str, bool]:
    """Whether each of ITEMS prompts is solved: `count` in a row, from number `shift` on."""
    return {f"p{i}": (i - shift) % ITEMS < count for i in range(ITEMS)}


def run(
    arm: str, seed: int, *counts: int, shift: int = 0, weights: str = "", state: str = "done",
    error: str = "",
) -> RunResult:  # fmt: skip
    """A run with an evaluation every 10 steps: `counts` prompts solved."""
    points = tuple(
        Point(
            step=10 * n,
            tokens=1000 * n,
            updates=40 * n,
            seconds=5.0 * n,
            correct=solved(count, shift),
        )
        for n, count in enumerate(counts)
    )
    return RunResult(arm=arm, seed=seed, state=state, error=error, points=points, weights=weights)


def compared(
    ends: Mapping[str, Sequence[int]], *more: RunResult, seeds: int | None = None
) -> Comparison:
    """Prompts solved by each arm at the end of seeds 0, 1, 2, ..., all from the same start."""
    outcomes = [run(arm, s, START, end) for arm, mine in ends.items() for s, end in enumerate(mine)]
    names = list(dict.fromkeys([*ends, *(o.arm for o in more)]))
    count = seeds or max(len(mine) for mine in ends.values())
    return Comparison(
        name="c", command="covey compare", arms=tuple(Arm(name=n, differences={}) for n in names),
        seeds=tuple(range(count)), budget="steps", amount=10, runs=(*outcomes, *more),
    )  # fmt: skip


def only_pair(comparison: Comparison) -> PairResult:
    (pair,) = conclude(comparison).pairs
    return pair


def test_the_better_algorithm_is_found_over_seeds() -> None:
    found = conclude(compared({"a": [98, 99, 98], "b": [2, 1, 2]}))
    (pair,) = found.pairs
    assert pair.differences == (0.96, 0.98, 0.96)
    assert (pair.decision, pair.better, pair.seeds) == ("better", "a", (0, 1, 2))
    assert pair.p_student == pytest.approx(stats.ttest_1samp([0.96, 0.98, 0.96], 0.0).pvalue)
    # If both arms were at 50 %, three seeds like these would have a probability of 1.7 %.
    top = 2.95 / 3
    assert pair.cancelling_share == pytest.approx(1 - 0.25 / top**2)
    assert pair.p_value == pair.p_corrected == pytest.approx(2 * (0.25 / top**2) ** 3)
    assert pair.difference is not None
    assert pair.difference.low == pytest.approx(2 * top * 0.025 ** (1 / 6) - 1)
    half = 4.302653 * np.std([0.96, 0.98, 0.96], ddof=1) / math.sqrt(3)
    assert pair.difference.high == pytest.approx(2.90 / 3 + half)
    assert pair.p_sign == 0.25
    assert pair.seeds_needed is None
    assert found.complete
    assert all("b seed" in text for text in found.cautions)  # b fell below its start
    assert found.headline == pair.summary
    assert pair.summary == (
        "a is better than b: +96.7 points, 95 % interval +6.3 to +99.5, over 3 seeds, p = 0.035."
    )
    assert "a's is better in seed 0, 1 and 2" in pair.checkpoint_summary
    assert "not about the algorithms" in pair.checkpoint_summary


def test_order_of_arms_changes_signs_but_not_the_summary() -> None:
    pair = only_pair(compared({"b": [2, 1, 2], "a": [98, 99, 98]}))
    assert pair.better == "a"
    assert pair.differences == (-0.96, -0.98, -0.96)
    assert pair.summary.startswith("a is better than b: +96.7 points, 95 % interval +6.3 to +99.5")


def test_seeds_that_agree_do_not_show_what_rare_runs_would_do() -> None:
    pair = only_pair(compared({"b": [51, 50, 51, 50, 51], "a": [60, 60, 61, 60, 60]}))
    assert (pair.decision, pair.better, pair.p_sign) == ("cannot tell", None, 1 / 16)
    assert pair.p_student is not None
    assert pair.p_student < 0.001
    assert pair.cancelling_share == pytest.approx(0.096 / 0.602)
    assert pair.p_value == pytest.approx(2 * (1 - 0.096 / 0.602) ** 5)
    assert pair.summary.startswith(
        "a leads b, but 5 seeds cannot show that it is better on average: +9.6 points, 95 % "
        "interval -24.6 to +37.9, over 5 seeds, p = 0.839. It is ahead in 5 of 5 seeds; if a ended "
        "at 0% or b at 100% in 16% of all runs, the means could be equal, and 5 seeds miss such "
        "runs with a probability of 42%."
    )


@pytest.mark.parametrize("seeds", [5, 8, 12])
def test_an_interval_excludes_0_if_and_only_if_the_corrected_p_is_below_5_percent(
    seeds: int,
) -> None:
    generator = np.random.default_rng(seeds)
    decided = 0
    for _ in range(30):
        tops = generator.uniform(2, 98, 3)
        ends = {
            arm: np.clip(generator.normal(top, 4, seeds), 0, 100).astype(int).tolist()
            for arm, top in zip("abc", tops, strict=True)
        }
        for pair in conclude(compared(ends)).pairs:
            assert pair.difference is not None
            assert pair.p_value is not None
            assert pair.p_corrected == pytest.approx(min(1.0, 3 * pair.p_value))
            excludes = not pair.difference.low <= 0 <= pair.difference.high
            assert excludes == (pair.p_corrected < 0.05) == (pair.decision == "better")
            decided += excludes
    assert 0 < decided < 90


def test_checkpoints_can_differ_where_algorithms_do_not() -> None:
    pair = only_pair(compared({"a": [80, 40, 60], "b": [40, 80, 62]}))
    assert (pair.decision, pair.better) == ("cannot tell", None)
    assert [(c.seed, c.gained, c.lost) for c in pair.checkpoints] == [
        (0, 40, 0),
        (1, 0, 40),
        (2, 0, 2),
    ]
    assert [c.p_value for c in pair.checkpoints] == pytest.approx([2**-39, 2**-39, 0.5])
    assert [c.p_holm for c in pair.checkpoints] == pytest.approx(holm([2**-39, 2**-39, 0.5]))
    assert pair.checkpoint_summary.startswith(
        "Final checkpoints of a and b: a's is better in seed 0; b's is better in seed 1; "
        "undecided in seed 2"
    )


def test_undecided_pair_says_how_many_seeds_are_needed() -> None:
    pair = only_pair(compared({"a": [60, 52, 58], "b": [55, 53, 54]}))
    assert pair.decision == "cannot tell"
    differences = np.array([0.05, -0.01, 0.04])
    deviation = differences.std(ddof=1)
    # A run of a at 0, or of b at 100 %, would move the difference by 57 points.
    needed = seeds_needed(differences.mean(), deviation, worse=0.54)
    assert pair.seeds_needed == needed
    assert needed is not None
    assert needed > 3 * (seeds_needed(differences.mean(), deviation) or 0)
    assert f"About {needed} seeds per arm would be needed if the difference and the" in pair.summary
    # No difference between an arm near 50 % and another one is certain with three seeds.
    assert pair.detectable is not None
    assert pair.detectable > 1
    assert pair.summary.endswith("3 seeds detect no difference with 80 % power.")
    pair = only_pair(compared({"a": [60, 52, 58] * 4, "b": [55, 53, 54] * 4}))
    assert pair.detectable == pytest.approx(0.2173, abs=5e-4)
    assert "points or more with at least 80 % power" in pair.summary


def test_zero_mean_difference_needs_too_many_seeds() -> None:
    pair = only_pair(compared({"a": [60, 50, 55], "b": [50, 60, 55]}))
    assert (pair.p_value, pair.seeds_needed) == (1.0, None)
    assert "More than 1000 seeds per arm" in pair.summary
    assert "0.0 points" in pair.summary


def test_one_seed_compares_only_checkpoints() -> None:
    found = conclude(compared({"a": [80], "b": [40]}))
    (pair,) = found.pairs
    assert (pair.decision, pair.better) == ("one seed", None)
    assert pair.p_value is pair.p_corrected is pair.difference is pair.seeds_needed is None
    assert pair.mean == pytest.approx(0.4)
    assert pair.checkpoints[0].p_value < 1e-9
    assert found.headline.startswith("One seed cannot show which algorithm is better")
    assert "a's is better in seed 0" in pair.checkpoint_summary
    arm = found.arms[0]
    assert arm.final is not None
    assert 0.7 < arm.final.low < 0.8 < arm.final.high < 0.9


def test_equal_weights_are_the_same_policy_without_a_test() -> None:
    same = [run(arm, s, START, 50 + s, weights=f"w{s}") for arm in ("a", "b") for s in (0, 1)]
    found = conclude(compared({}, *same, seeds=2))
    (pair,) = found.pairs
    assert pair.decision == "same policy"
    assert pair.p_value is None
    assert pair.checkpoints == ()
    assert pair.summary == "a and b are the same policy, bit for bit, in 2 seeds."
    assert found.headline == (
        "a and b are the same policy, bit for bit, in every seed: there is no difference."
    )


def test_same_policy_needs_known_equal_weights_in_every_seed() -> None:
    for other, digest in (("w0", "w0"), ("w1", "w2"), ("", "")):
        runs = [run("a", 0, START, 50, weights="w0"), run("b", 0, START, 50, weights="w0")]
        runs += [run("a", 1, START, 50, weights=other), run("b", 1, START, 51, weights=digest)]
        pair = only_pair(compared({}, *runs, seeds=2))
        assert (pair.decision == "same policy") == (other == digest != "")


def test_same_policy_does_not_count_in_the_correction() -> None:
    runs = [run(arm, s, START, 60 + s, weights=f"w{s}") for arm in ("a", "b") for s in (0, 1, 2)]
    runs += [run("c", s, START, 50 + 2 * s, weights=f"c{s}") for s in (0, 1, 2)]
    pairs = {(p.first, p.second): p for p in conclude(compared({}, *runs, seeds=3)).pairs}
    assert pairs["a", "b"].decision == "same policy"
    tested = pairs["a", "c"]
    assert tested.p_value is not None
    assert tested.p_corrected == pytest.approx(min(1.0, 2 * tested.p_value))
    assert "corrected for 2 pairs" in tested.summary


def test_same_solved_prompts_are_no_difference() -> None:
    pair = only_pair(compared({"a": [50, 60, 55], "b": [50, 60, 55]}))
    assert (pair.decision, pair.p_value, pair.better) == ("no difference", 1.0, None)
    assert pair.summary == ("a and b solve the same prompts in 3 seeds, with different weights.")
    assert only_pair(compared({"a": [50, 60], "b": [50, 60]})).decision == "no difference"


def test_two_seeds_are_too_few_to_rank_and_show_the_value_of_each() -> None:
    found = conclude(compared({"a": [60, 80], "b": [50, 52]}))
    (pair,) = found.pairs
    assert (pair.decision, pair.better, pair.difference, pair.p_value) == (
        "two seeds", None, None, None,
    )  # fmt: skip
    assert found.headline == (
        "Too few seeds to rank a and b: a - b is +10.0 points in seed 0 and +28.0 points in seed "
        "1; run at least three seeds."
    )
    cells = [
        *result_table(found).rows[0],
        *training_table(found).rows[0],
        *pair_table(found).rows[0],
    ]
    assert "by seed: +40.0, +60.0" in cells
    assert "by seed: 60.0%, 80.0%" in cells
    assert "by seed: +10.0, +28.0" in cells
    assert not any("100.0" in cell for cell in cells)
    found = conclude(compared({"a": [60, 80], "b": [50, 52], "c": [40, 41]}))
    assert found.headline.startswith("Too few seeds to rank the arms")


def graded(arm: str, seed: int, *means: float) -> RunResult:
    """A run whose completions are never correct; rewards scatter around `means`."""
    points = tuple(
        Point(
            step=10 * n, tokens=1000 * n, updates=40 * n, seconds=5.0 * n,
            correct=dict.fromkeys(solved(0), False),
            rewards={f"p{i}": {"reward": mean + i / 1000, "parts/form": i % 2} for i in range(ITEMS)},
        )
        for n, mean in enumerate(means)
    )  # fmt: skip
    return RunResult(arm=arm, seed=seed, state="done", points=points)


def by_reward(*runs: RunResult, seeds: int) -> Comparison:
    assert compared_by(runs) == "reward"
    return compared({}, *(with_metric(run, "reward") for run in runs), seeds=seeds)


def test_rewards_without_success_are_compared_by_their_mean() -> None:
    runs = [graded("a", s, 0.1, -3.0 + s / 50) for s in range(3)]
    runs += [graded("b", s, 0.1, -5.0 + s / 40) for s in range(3)]
    found = conclude(by_reward(*runs, seeds=3))
    (pair,) = found.pairs
    # The rewards are from -5 to 0.2, so a rare run may get less than -5.
    assert (pair.decision, pair.better, pair.by) == ("cannot tell", None, "reward")
    assert pair.mean == pytest.approx(2.0 - (0.005 + 0.01) / 3)
    assert found.headline.startswith("a leads b, but 3 seeds cannot show")
    assert "+1.995 in mean reward, 95 % interval" in found.headline
    assert any("compared by their mean reward" in text for text in found.cautions)
    arm = found.arms[0]
    assert arm.initial is not None
    assert arm.initial.value == pytest.approx(0.1495)
    assert arm.rewards["reward"].final.value == pytest.approx(-3.0 + 0.02 + 0.0495)
    assert arm.rewards["parts/form"].improvement.value == 0.0
    table = result_table(found)
    assert table.title == "Held-out mean reward before and after training"
    for other in (result_table, training_table, pair_table, checkpoint_table, speed_table):
        text = f"{other(found).title} {other(found).note}"
        assert not re.search("accurac|ercentage|McNemar", text), text
    assert table.rows[0][1:4] == ["0.149", "-2.931", "-3.080"]
    assert reward_table(found).rows[1][:4] == ["a", "form", "0.500", "0.500"]


def test_one_success_anywhere_decides_by_success() -> None:
    assert compared_by([graded("a", 0, 0.1), run("b", 0, 0, 1)]) == "success"
    assert compared_by([run("a", 0, 0, 0)]) == "success"


def test_no_improvement_from_nothing_has_an_interval_all_the_same() -> None:
    runs = [run(arm, s, 0, 0, weights=f"{arm}{s}") for arm in "ab" for s in range(3)]
    arm = conclude(compared({}, *runs, seeds=3)).arms[0]
    for estimate in (arm.initial, arm.final, arm.improvement):
        assert estimate is not None
        assert estimate.value == 0.0
        assert estimate.high == pytest.approx(proportion(0, ITEMS).high)


def test_accuracy_that_is_not_above_the_best_constant_is_named() -> None:
    def found(end: int) -> Conclusion:
        runs = [run(arm, s, 5, end + s) for arm in "ab" for s in range(3)]
        runs = [
            replace(r, points=tuple(replace(p, distinct_answers=1) for p in r.points)) for r in runs
        ]
        return conclude(replace(compared({}, *runs, seeds=3), best_constant=0.375))

    low, high = found(37), found(90)
    assert low.arms[0].above_constant == pytest.approx(0.005)
    assert "a ends +0.5 points from the best constant answer, with 1 distinct" in low.cautions[0]
    assert high.cautions == ()
    table = result_table(low)
    assert table.head[-3:] == ["above constant", "answers", "seeds"]
    assert table.rows[0][-3:] == ["+0.5", "1", "3"]


def test_equal_accuracies_on_different_prompts_are_not_called_equal() -> None:
    others = [run("b", s, START, 50, shift=10) for s in (0, 1, 2)]
    pair = only_pair(compared({"a": [50, 50, 50]}, *others))
    assert (pair.decision, pair.p_value) == ("cannot tell", 1.0)
    assert [(c.gained, c.lost) for c in pair.checkpoints] == [(10, 10)] * 3


def test_equal_differences_have_a_finite_p() -> None:
    pair = only_pair(compared({"a": [60, 70, 65], "b": [50, 60, 55]}))
    assert pair.differences == (0.1, 0.1, 0.1)
    assert pair.p_student is not None
    assert 0.0 < pair.p_student < 0.001
    assert pair.decision == "cannot tell"


def test_small_difference_is_limited_to_these_prompts() -> None:
    pair = only_pair(compared({"a": [99] * 12, "b": [2] * 12}))
    assert pair.decision == "better"
    assert pair.difference_new_prompts is not None
    assert pair.difference_new_prompts.low > 0
    # One of two prompts in each of twelve seeds: certain for these two, but not for others.
    runs = [
        replace(each, points=tuple(
            replace(point, correct={"p0": each.arm == "a", "p1": False}) for point in each.points
        ))
        for each in (run(arm, seed, START, 50) for arm in "ab" for seed in range(12))
    ]  # fmt: skip
    pair = only_pair(compared({}, *runs, seeds=12))
    assert pair.decision == "better"
    assert pair.difference_new_prompts is not None
    assert pair.difference_new_prompts.low < 0
    assert "This holds for these held-out prompts" in pair.summary


def test_the_correction_is_over_all_pairs() -> None:
    ends = {"a": [99, 98, 99] * 2, "b": [50, 52, 50] * 2, "c": [2, 1, 2] * 2}
    found = conclude(compared(ends))
    for pair in found.pairs:
        assert pair.p_value is not None
        assert pair.p_corrected == pytest.approx(min(1.0, 3 * pair.p_value))
        assert pair.difference is not None
        (low, high) = pair.difference.low, pair.difference.high
        alone = only_pair(compared({arm: ends[arm] for arm in (pair.first, pair.second)}))
        assert alone.difference is not None
        assert low < alone.difference.low < alone.difference.high < high
    assert "simultaneous 95 % interval" in found.pairs[1].summary
    assert [p.better for p in found.pairs] == [None, "a", None]
    wide = conclude(compared({"a": [99, 98, 99] * 4, "b": [50, 52, 50] * 4, "c": [2, 1, 2] * 4}))
    assert [p.better for p in wide.pairs] == ["a", "a", "b"]
    assert wide.headline == (
        "a is better than every other arm: +48.0 points over b, +97.0 points over c."
    )


def test_headline_names_decided_and_undecided_pairs() -> None:
    found = conclude(compared({"a": [97, 98] * 3, "b": [98, 96] * 3, "c": [1, 2] * 3}))
    assert found.headline == (
        "No arm is better than all others: a is better than c, b is better than c; the other pairs "
        "do not differ significantly."
    )
    found = conclude(compared({"a": [70, 60, 71], "b": [71, 62, 70], "c": [65, 72, 71]}))
    assert found.headline.startswith(
        "No significant difference between the arms with this budget. The largest is between a and "
        "c: -2.3 points."
    )


def test_headline_claims_nothing_about_pairs_without_a_test() -> None:
    few = " Not tested, with fewer than 3 seeds in common: a - c and b - c."
    found = conclude(compared({"a": [70, 60, 71], "b": [71, 62, 70], "c": [20]}))
    assert found.headline == found.pairs[0].summary + few
    assert "The largest" not in found.headline
    assert any("fewer than 3 seeds" in text for text in found.cautions)
    found = conclude(compared({"a": [98, 99, 98], "b": [1, 2, 1], "c": [20, 90]}))
    assert found.headline == found.pairs[0].summary + few
    assert found.headline.startswith("a is better than b: ")
    late = run("c", 3, START, 50)
    found = conclude(compared({"a": [98, 99, 98], "b": [1, 2, 1]}, late, seeds=4))
    assert found.headline.endswith(few)  # no seed in common

    arms = {"a": [97, 98] * 3, "b": [1, 2] * 3, "c": [2, 3] * 3, "d": [99]}
    found = conclude(compared(arms))
    assert found.headline == (
        "In the tested pairs: a is better than b, a is better than c; the other pairs do not "
        "differ significantly. Not tested, with fewer than 3 seeds in common: a - d, b - d and "
        "c - d."
    )
    found = conclude(compared({**arms, "a": [1, 1] * 3}))
    assert found.headline.startswith(
        "No significant difference in the tested pairs with this budget. The largest is between a "
        "and c: -1.5 points."
    )


def test_headline_names_equal_policies_beside_an_arm_without_runs() -> None:
    runs = [run(arm, 0, START, 50, weights="x") for arm in "ab"]
    found = conclude(compared({}, *runs, run("c", 0, state="failed"), seeds=1))
    assert found.headline == (
        "a and b are the same policy, bit for bit, in 1 seed. No other two arms have finished the "
        "same seed."
    )


def test_a_run_without_its_first_or_last_evaluation_is_left_out() -> None:
    whole = run("b", 0, START, 30, 40)
    for lost, finished in ((0, False), (10, True), (20, False)):
        points = tuple(point for point in whole.points if point.step != lost)
        found = conclude(
            compared({"a": [50]}, replace(whole, points=points, unreadable=(lost,)), seeds=1)
        )
        line = f"b seed 0: done, but without a readable evaluation of step {lost}"
        assert found.arms[1].missing == (() if finished else (line,))
        assert found.arms[1].finals == ((0.4,) if finished else ())
        assert any("delete its folder" in text for text in found.cautions) != finished


def test_a_run_that_ended_before_its_budget_is_named() -> None:
    runs = [run("a", 0, START, 50), run("b", 0, START, 50, 60)]
    found = conclude(replace(compared({}, *runs, seeds=1), amount=20))
    assert found.cautions == (
        "Not all runs have a last evaluation at their budget of 20 steps: a seed 0 at 10 steps.",
    )
    tokens = replace(compared({}, *runs, seeds=1), amount=1000, budget="tokens")
    assert conclude(tokens).cautions == ()


def test_missing_runs_are_named_and_pairs_use_shared_seeds() -> None:
    comparison = compared(
        {"a": [60, 64, 62, 63], "b": [50, 50]},
        run("b", 2, START, 30, state="failed", error="out of memory"),
        seeds=5,
    )
    found = conclude(comparison)
    (pair,) = found.pairs
    assert not found.complete
    assert pair.seeds == (0, 1)
    assert pair.missing == (
        "a seed 4: not run",
        "b seed 2: failed, out of memory",
        "b seed 3: not run",
        "b seed 4: not run",
    )
    assert [arm.seeds for arm in found.arms] == [4, 2]
    text = " ".join(found.cautions)
    assert "The comparison is incomplete" in text
    assert "b seed 2: failed, out of memory" in text
    assert "overrates" in text
    # Seed 2 of b counted at the start's 20: (10 + 14 + 42) / 3.
    assert "If failed runs count as untrained, a - b is +22.0 points instead of +12.0." in text
    assert pair.decision == "two seeds"


def test_failed_run_keeps_the_initial_accuracy_of_its_arm() -> None:
    small = [run("small", seed, 10, end) for seed, end in enumerate((20, 21, 20))]
    big = [run("big", seed, 70, end) for seed, end in enumerate((80, 82))]
    found = conclude(compared({"small": []}, *small, *big, run("big", 2, state="failed"), seeds=3))
    # Seed 2 of big counted at 70: (-60 - 61 - 50) / 3.
    assert "small - big is -57.0 points instead of -60.5." in " ".join(found.cautions)


@pytest.mark.parametrize(
    ("ends", "headline"),
    [
        ({"a": [], "b": []}, "No run has finished: there is nothing to compare."),
        (
            {"a": [50, 51], "b": []},
            "Only a has finished runs: there is nothing to compare it with.",
        ),
    ],
)
def test_a_comparison_without_pairs_says_so(ends: dict[str, list[int]], headline: str) -> None:
    found = conclude(compared(ends, seeds=2))
    assert found.headline == headline
    assert found.arms[1].final is None
    assert found.pairs[0].decision == "nothing to compare"
    assert found.pairs[0].mean is None
    json.dumps(asdict(found), allow_nan=False)


def test_unfinished_or_unevaluated_run_is_left_out() -> None:
    more = (run("b", 0, START, 99, state="unfinished"), run("b", 1))
    found = conclude(compared({"a": [50, 51]}, *more))
    assert found.arms[1].missing == (
        "b seed 0: unfinished",
        "b seed 1: done, but never evaluated",
    )
    assert found.arms[1].seeds == 0


def test_runs_on_different_prompts_are_an_error() -> None:
    point = Point(step=0, tokens=0, updates=0, seconds=0.0, correct={"q": True})
    other = RunResult(arm="b", seed=0, state="done", points=(point,))
    with pytest.raises(
        RunError,
        match="arm b with seed 0 and arm a with seed 0 were evaluated on different prompts at step",
    ):
        conclude(compared({"a": [50]}, other))


def test_arm_result_has_initial_final_best_and_area() -> None:
    runs = [
        run("a", 0, 20, 40, 60),
        run("a", 1, 20, 60, 50),
        run("b", 0, 20, 30, 40),
        run("b", 1, 20, 30, 42),
    ]
    found = conclude(compared({}, *runs, seeds=2))
    a, b = found.arms
    values = [e.value for e in (a.initial, a.final, a.improvement, a.best, a.area) if e is not None]
    assert values == pytest.approx([0.2, 0.55, 0.35, 0.6, (0.4 + 0.475) / 2])
    # Every seed of every arm comes to 40 %; from 20 % on, half of the way is 30 %.
    assert [r.accuracy for r in a.time_to_accuracy] == pytest.approx([0.3, 0.4])
    assert [(r.budget, r.tokens, r.seconds, r.reached) for r in a.time_to_accuracy] == [
        (pytest.approx(3.75), pytest.approx(375), pytest.approx(1.875), 2),
        (pytest.approx(7.5), pytest.approx(750), pytest.approx(3.75), 2),
    ]
    assert [r.budget for r in b.time_to_accuracy] == pytest.approx(
        [10.0, (20 + 10 + 10 * 10 / 12) / 2]
    )


def test_areas_end_where_the_shortest_run_does() -> None:
    runs = [run("a", 0, 20, 40), run("b", 0, 20, 40, 100)]
    a, b = conclude(compared({}, *runs, seeds=1)).arms
    assert a.area is not None
    assert b.area is not None
    assert (a.area.value, b.area.value) == pytest.approx((0.3, 0.3))


def test_time_to_accuracy_needs_half_of_the_seeds() -> None:
    runs = [run("a", 0, 20, 60), run("a", 1, 20, 60), run("a", 2, 20, 22)]
    runs += [run("b", 0, 20, 80), run("b", 1, 20, 24), run("b", 2, 20, 60)]
    found = conclude(compared({}, *runs, seeds=3))
    last = [arm.time_to_accuracy[-1] for arm in found.arms]
    assert [(r.accuracy, r.reached) for r in last] == [(pytest.approx(0.6), 2)] * 2
    assert [r.budget for r in last] == pytest.approx([10.0, 10.0])


def test_arms_that_only_get_worse_have_no_time_to_accuracy() -> None:
    assert conclude(compared({"a": [10, 10], "b": [12, 13]})).arms[0].time_to_accuracy == ()


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ((20, 70, 34), "lost half of its best"),
        ((20, 70, 36), None),  # a bad end, but not half
        ((20, 70, 5), "lost half of its best"),
        ((50, 55, 30), "below its start"),
        ((50, 52, 46), None),  # four fewer: chance
        ((2, 6, 1), None),  # half of next to nothing: chance
    ],
)
def test_collapse_loses_half_or_falls_below_the_start_beyond_chance(
    counts: tuple[int, ...], kind: str | None
) -> None:
    runs = [run("a", 0, *counts), run("b", 0, 20, 30, 40)]
    found = conclude(compared({}, *runs, seeds=1))
    (a, b) = found.arms
    assert [one.kind for one in a.collapsed] == ([kind] if kind else [])
    assert b.collapsed == ()
    assert any("a seed 0 collapsed" in text for text in found.cautions) == bool(kind)


def test_the_sign_test_stands_beside() -> None:
    pair = only_pair(compared({"a": [60, 62, 64, 61, 63, 65], "b": [50, 55, 51, 52, 53, 54]}))
    assert pair.p_sign == 2 / 64
    assert pair.decision == "cannot tell"


def test_conclusion_is_plain_data() -> None:
    found = conclude(compared({"a": [60, 64, 62], "b": [50, 50, 52]}))
    row = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert row["pairs"][0]["difference"]["value"] == pytest.approx(0.11333, abs=1e-5)
    assert row["arms"][0]["final"]["value"] == pytest.approx(0.62)
