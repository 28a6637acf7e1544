from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from covey.lab.compare.comparison import Arm, Comparison, Point, RunResult
from covey.lab.compare.report import (
    HEALTH,
    HEALTH_POINTS,
    choose_examples,
    report_contents,
    trend,
)
from covey.records.metric_registry import meaning


def line(prompt_id: str, correct: bool | None) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id, "prompt": f"{prompt_id}?", "target": "7", "completion": f"= {correct}",
        "success": correct, "reward": 1.0, "tokens": 3, "finish": "stop", "values": {}, "samples": [], "info": {},
    }  # fmt: skip


def items(digits: str) -> dict[str, dict[str, Any]]:
    return {f"p{n}": line(f"p{n}", digit == "1") for n, digit in enumerate(digits)}


def test_examples_of_every_kind_with_differing_ones_first() -> None:
    shown = choose_examples({"x": items("1100110011"), "y": items("1010101010")})
    assert [(each.kind, each.prompt_id) for each in shown] == [
        ("arms differ", "p1"),
        ("arms differ", "p2"),
        ("arms differ", "p5"),
        ("all correct", "p0"),
        ("all incorrect", "p3"),
        ("all incorrect", "p7"),
    ]
    assert shown[0].completions["x"] == {
        "text": "= True",
        "correct": True,
        "tokens": 3,
        "finish": "stop",
    }
    assert shown[0].completions["y"]["correct"] is False
    assert choose_examples({}) == ()


def test_unscored_completion_is_not_correct() -> None:
    shown = choose_examples({"x": {"p": line("p", None)}, "y": {"p": line("p", True)}})
    assert shown[0].kind == "arms differ"
    assert shown[0].completions["x"]["correct"] is None


def test_trend_is_the_mean_over_runs_with_that_step() -> None:
    one = [{"step": 1, "m": 1.0}, {"step": 2, "m": 5.0}, {"step": 3, "m": None}]
    other = [{"step": 1, "m": 3.0}, {"step": 2}, {"step": 4, "m": math.inf}]
    found = trend("x", "m", [one, other])
    assert (found.steps, found.values) == ((1.0, 2.0), (2.0, 5.0))
    assert trend("x", "other", [one]).steps == ()


def test_long_trend_is_averaged() -> None:
    found = trend("x", "m", [[{"step": n + 1, "m": float(n)} for n in range(3 * HEALTH_POINTS)]])
    assert len(found.steps) == HEALTH_POINTS
    assert (found.steps[0], found.values[0]) == (2.0, 1.0)
    assert (found.steps[-1], found.values[-1]) == (599.0, 598.0)


def test_health_panels_show_registered_metrics() -> None:
    assert [name for names in HEALTH.values() for name in names if meaning(name) is None] == []


def run_of(arm: str, seed: int, state: str = "done") -> RunResult:
    point = Point(step=20, tokens=9, updates=8, seconds=1.0, correct={"p0": True})
    return RunResult(
        arm=arm, seed=seed, state=state, points=(point,), folder=f"runs/{arm}/seed-{seed}"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for arm, kl in (("x", "objective/kl_avg"), ("y", "policy/approxkl_avg")):
        for seed in (1, 2):
            run = tmp_path / f"runs/{arm}/seed-{seed}"
            (run / "evaluations").mkdir(parents=True)
            rows = [line("p0", True) | {"completion": f"{arm}{seed}"}]
            (run / "evaluations/000020.jsonl").write_text(
                "".join(json.dumps(r) + "\n" for r in rows)
            )
            (run / "evaluations/000000.jsonl").write_text("")
            (run / "steps.jsonl").write_text(json.dumps({"step": 1, kl: float(seed)}) + "\n")
    return tmp_path


def compared(*outcomes: RunResult) -> Comparison:
    arms = (Arm(name="x", differences={}), Arm(name="y", differences={}))
    return Comparison(
        name="n", command="c", arms=arms, seeds=(1, 2), budget="steps", amount=20, runs=outcomes
    )


def test_examples_are_from_the_last_evaluation_of_the_seed_most_arms_finished(
    folder: Path,
) -> None:
    found = report_contents(
        folder,
        compared(run_of("y", 2), run_of("x", 1, "failed"), run_of("x", 2), run_of("y", 1)),
    )
    assert found.example_seed == 2
    assert {arm: a["text"] for arm, a in found.examples[0].completions.items()} == {
        "x": "x2",
        "y": "y2",
    }
    assert found.texts == {"p0": ("p0?", "7")}


def test_kl_is_to_the_reference_if_an_arm_has_one(folder: Path) -> None:
    found = report_contents(folder, compared(*(run_of(a, s) for a in "xy" for s in (1, 2))))
    assert [(t.arm, t.metric, t.values) for t in found.health["KL"]] == [
        ("x", "objective/kl_avg", (1.5,)),
        ("y", "policy/approxkl_avg", (1.5,)),
    ]
    assert list(found.health) == ["KL"]


def test_folders_without_completions_and_steps_give_an_empty_report(tmp_path: Path) -> None:
    found = report_contents(tmp_path, compared(run_of("x", 1), run_of("y", 1, "failed")))
    assert (found.texts, found.example_seed, found.examples, found.health) == ({}, None, (), {})
