from __future__ import annotations

import pytest

from covey.lab.compare.arm_results import prompt_agreement
from covey.lab.compare.comparison import Arm, Comparison, Point, RunResult
from covey.lab.compare.tables import contested_table, solved_table

# Who solves prompts a to f at the end: one digit per prompt.
RUNS = {
    ("x", 1): "111000",
    ("x", 2): "110100",
    ("x", 3): "110001",
    ("y", 1): "101000",
    ("y", 2): "101100",
    ("y", 3): "101000",
}


def compared(runs: dict[tuple[str, int], str], failed: tuple[str, int] | None = None) -> Comparison:
    runs_made = tuple(
        RunResult(
            arm=arm,
            seed=seed,
            state="failed" if (arm, seed) == failed else "done",
            points=(
                Point(step=0, tokens=0, updates=0, seconds=0.0, correct=dict.fromkeys("abcdef", True)),
                Point(step=1, tokens=1, updates=1, seconds=1.0,
                      correct={name: digit == "1" for name, digit in zip("abcdef", correct, strict=True)}),
            ),
        )
        for (arm, seed), correct in runs.items()
    )  # fmt: skip
    return Comparison(
        name="n", command="c", arms=(Arm(name="x", differences={}), Arm(name="y", differences={})),
        seeds=(1, 2, 3), budget="steps", amount=1, runs=runs_made,
    )  # fmt: skip


def test_an_arm_solves_a_prompt_with_a_majority_of_its_seeds() -> None:
    found = prompt_agreement(compared(RUNS))
    assert found is not None
    assert (found.num_prompts, found.solved_by_all, found.solved_by_none, found.solved_by_some) == (
        6,
        1,
        3,
        0,
    )
    assert found.solved_only_by == {"x": 1, "y": 1}
    assert [prompt.id for prompt in found.most_different] == ["b", "c", "f"]
    assert found.most_different[1].solved == {"x": 1, "y": 3}


def test_disagreement_between_arms_and_between_seeds() -> None:
    found = prompt_agreement(compared(RUNS))
    assert found is not None
    # x: 2, 2, 2 of 6 prompts between its pairs of seeds; y: 1, 0, 1. Same seed: 1, 2, 3 of 6.
    assert found.disagreement_between_seeds == pytest.approx(8 / 36)
    assert found.disagreement_between_arms == pytest.approx(6 / 18)
    assert "disagree on 33.3% of the prompts, two seeds of the same arm on 22.2%" in (
        solved_table(found).note
    )


def test_failed_runs_and_arms_without_a_finished_run_are_left_out() -> None:
    found = prompt_agreement(compared(RUNS, failed=("x", 3)))
    assert found is not None
    assert found.runs == {"x": 2, "y": 3}
    # c is solved by one of two seeds of x, which is no majority.
    assert found.solved_only_by == {"x": 1, "y": 1}
    alone = prompt_agreement(compared({("x", 1): "111000"}))
    assert alone is not None
    assert (alone.runs, alone.solved_by_all, alone.solved_only_by, alone.solved_by_some) == (
        {"x": 1},
        3,
        {},
        0,
    )
    assert alone.disagreement_between_arms is None
    assert "No two arms" in solved_table(alone).note
    assert prompt_agreement(compared({})) is None


def test_one_seed_has_no_disagreement_between_seeds() -> None:
    found = prompt_agreement(compared({("x", 1): "111000", ("y", 1): "101000"}))
    assert found is not None
    assert found.disagreement_between_seeds is None
    assert "one seed cannot show" in solved_table(found).note


def test_contested_prompts_show_their_texts_if_known() -> None:
    found = prompt_agreement(compared(RUNS))
    assert found is not None
    rows = contested_table(found, {"b": ("1+1?", "2")}).rows
    assert rows[:2] == [["1+1?", "2", "3 of 3", "0 of 3"], ["c", "-", "1 of 3", "3 of 3"]]
