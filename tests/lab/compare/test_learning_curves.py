from __future__ import annotations

from covey.lab.compare.arm_results import learning_curve
from covey.lab.compare.comparison import Arm, Comparison, Point, RunResult
from covey.lab.compare.tables import curve_table


def point(step: int, correct: int, tokens: int | None = None) -> Point:
    """An evaluation on four prompts."""
    solved = {str(number): number < correct for number in range(4)}
    tokens = 100 * step if tokens is None else tokens
    return Point(step=step, tokens=tokens, updates=4 * step, seconds=step / 2, correct=solved)


def comparison(*runs: RunResult) -> Comparison:
    return Comparison(
        name="n", command="c", arms=(Arm(name="a", differences={}),), seeds=(1, 2, 3),
        budget="steps", amount=20, runs=runs,
    )  # fmt: skip


def run(seed: int, *points: Point, state: str = "done") -> RunResult:
    return RunResult(arm="a", seed=seed, state=state, points=points)


def test_mean_and_range_are_over_finished_seeds() -> None:
    drawn = learning_curve(
        comparison(
            run(1, point(0, 0), point(10, 1), point(20, 4)),
            run(2, point(0, 0), point(10, 3), point(20, 2)),
            run(3, point(0, 4), point(10, 4), state="failed"),
        ),
        "a",
    )
    assert drawn.x["steps"] == (0, 10, 20)
    assert drawn.mean == (0.0, 0.5, 0.75)
    assert (drawn.low, drawn.high) == ((0.0, 0.25, 0.5), (0.0, 0.75, 1.0))
    assert [(line.seed, line.state, line.accuracy) for line in drawn.lines] == [
        (1, "done", (0.0, 0.25, 1.0)),
        (2, "done", (0.0, 0.75, 0.5)),
        (3, "failed", (1.0, 1.0)),
    ]


def test_ends_at_different_steps_are_averaged() -> None:
    # A budget of 2,000 tokens, which the seeds reach after 21 and 19 steps.
    drawn = learning_curve(
        comparison(
            run(1, point(0, 0), point(10, 2, 950), point(20, 3, 1900), point(21, 4, 2000)),
            run(2, point(0, 0), point(10, 2, 1050), point(19, 2, 2020)),
        ),
        "a",
    )
    assert drawn.x["steps"] == (0, 10, 20)
    assert drawn.x["tokens"] == (0, 1000, 2010)
    assert drawn.mean == (0.0, 0.5, 0.75)
    assert drawn.x["seconds"] == (0, 5, 10)
    # What the first has at step 20 is not its end.
    assert drawn.seeds == {1: (0.0, 0.5, 1.0), 2: (0.0, 0.5, 0.5)}


def test_table_shows_each_seed_at_the_steps_of_the_mean() -> None:
    drawn = learning_curve(
        comparison(
            run(1, point(0, 0), point(5, 1), point(10, 3)),
            run(2, point(0, 1), point(6, 1), point(12, 2)),
            run(3, point(0, 1), point(11, 4), point(14, 1)),
            run(4, point(0, 2), point(12, 4), state="failed"),
        ),
        "a",
    )
    table = curve_table(drawn)
    assert [row[4:] for row in (table.head, *table.rows)] == [
        ["mean", "lowest", "highest", "seed 1", "seed 2", "seed 3", "seed 4"],
        ["16.7%", "0.0%", "25.0%", "0.0%", "25.0%", "25.0%", "50.0%"],
        ["50.0%", "25.0%", "75.0%", "75.0%", "50.0%", "25.0%", "-"],
    ]


def test_an_arm_without_a_finished_run_has_lines_but_no_mean() -> None:
    drawn = learning_curve(
        comparison(run(1, point(0, 2), state="unfinished"), run(2, state="failed")), "a"
    )
    assert drawn.mean == ()
    assert drawn.seeds == {}
    assert drawn.x["tokens"] == ()
    assert [line.seed for line in drawn.lines] == [1]
