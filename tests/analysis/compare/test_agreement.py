from __future__ import annotations

import pytest

from covey.analysis.compare.agreement import agreement
from covey.analysis.compare.listings import contested_table, solved_table
from covey.analysis.compare.outcome import Arm, Comparison, Outcome, Point

# Who solves problems a to f at the end: one digit a problem.
RUNS = {
    ("x", 1): "111000",
    ("x", 2): "110100",
    ("x", 3): "110001",
    ("y", 1): "101000",
    ("y", 2): "101100",
    ("y", 3): "101000",
}


def compared(runs: dict[tuple[str, int], str], failed: tuple[str, int] | None = None) -> Comparison:
    outcomes = tuple(
        Outcome(
            arm=arm,
            seed=seed,
            state="failed" if (arm, seed) == failed else "done",
            points=(
                Point(step=0, tokens=0, updates=0, seconds=0.0, right=dict.fromkeys("abcdef", True)),
                Point(step=1, tokens=1, updates=1, seconds=1.0,
                      right={name: digit == "1" for name, digit in zip("abcdef", right, strict=True)}),
            ),
        )
        for (arm, seed), right in runs.items()
    )  # fmt: skip
    return Comparison(
        name="n", command="c", arms=(Arm(name="x", differences={}), Arm(name="y", differences={})),
        seeds=(1, 2, 3), budget="steps", amount=1, outcomes=outcomes,
    )  # fmt: skip


def test_problems_are_counted_by_the_majority_of_an_arms_seeds() -> None:
    found = agreement(compared(RUNS))
    assert found is not None
    assert (found.problems, found.by_all, found.by_none, found.by_some) == (6, 1, 3, 0)
    assert found.only == {"x": 1, "y": 1}
    assert [problem.id for problem in found.most_different] == ["b", "c", "f"]
    assert found.most_different[1].solved == {"x": 1, "y": 3}


def test_disagreement_between_arms_stands_beside_that_between_seeds() -> None:
    found = agreement(compared(RUNS))
    assert found is not None
    # x: 2, 2, 2 of 6 problems between its pairs of seeds; y: 1, 0, 1. Same seed: 1, 2, 3 of 6.
    assert found.between_seeds == pytest.approx(8 / 36)
    assert found.between_arms == pytest.approx(6 / 18)
    assert "disagree on 33.3% of the problems, two seeds of the same arm on 22.2%" in (
        solved_table(found).note
    )


def test_failed_runs_and_arms_without_a_finished_run_count_for_nothing() -> None:
    found = agreement(compared(RUNS, failed=("x", 3)))
    assert found is not None
    assert found.runs == {"x": 2, "y": 3}
    # c is solved by one of two seeds of x, which is no majority.
    assert found.only == {"x": 1, "y": 1}
    alone = agreement(compared({("x", 1): "111000"}))
    assert alone is not None
    assert (alone.runs, alone.by_all, alone.only, alone.by_some) == ({"x": 1}, 3, {}, 0)
    assert alone.between_arms is None
    assert "no two arms" in solved_table(alone).note
    assert agreement(compared({})) is None


def test_one_seed_says_that_it_cannot_tell_chance() -> None:
    found = agreement(compared({("x", 1): "111000", ("y", 1): "101000"}))
    assert found is not None
    assert found.between_seeds is None
    assert "one seed cannot tell" in solved_table(found).note


def test_contested_problems_are_told_with_their_texts_where_they_are_known() -> None:
    found = agreement(compared(RUNS))
    assert found is not None
    rows = contested_table(found, {"b": ("1+1?", "2")}).rows
    assert rows[:2] == [["1+1?", "2", "3 of 3", "0 of 3"], ["c", "-", "1 of 3", "3 of 3"]]
