from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from covey.analysis.compare.evidence import HEALTH, HEALTH_POINTS, gather, side_by_side, trend
from covey.analysis.compare.outcome import Arm, Comparison, Outcome, Point
from covey.run.metrics import meaning


def line(prompt_id: str, right: bool | None) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id, "prompt": f"{prompt_id}?", "target": "7", "completion": f"= {right}",
        "success": right, "reward": 1.0, "tokens": 3, "finish": "stop", "values": {}, "samples": [], "info": {},
    }  # fmt: skip


def answers(digits: str) -> dict[str, dict[str, Any]]:
    return {f"p{n}": line(f"p{n}", digit == "1") for n, digit in enumerate(digits)}


def test_problems_side_by_side_are_of_every_kind_and_those_that_differ_come_first() -> None:
    shown = side_by_side({"x": answers("1100110011"), "y": answers("1010101010")})
    assert [(each.kind, each.prompt_id) for each in shown] == [
        ("arms differ", "p1"),
        ("arms differ", "p2"),
        ("arms differ", "p5"),
        ("all right", "p0"),
        ("all wrong", "p3"),
        ("all wrong", "p7"),
    ]
    assert shown[0].answers["x"] == {"text": "= True", "right": True, "tokens": 3, "finish": "stop"}
    assert shown[0].answers["y"]["right"] is False
    assert side_by_side({}) == ()


def test_an_answer_that_could_not_be_scored_is_not_right_and_says_so() -> None:
    shown = side_by_side({"x": {"p": line("p", None)}, "y": {"p": line("p", True)}})
    assert shown[0].kind == "arms differ"
    assert shown[0].answers["x"]["right"] is None


def test_a_trend_is_the_mean_over_runs_of_the_steps_that_have_it() -> None:
    one = [{"step": 1, "m": 1.0}, {"step": 2, "m": 5.0}, {"step": 3, "m": None}]
    other = [{"step": 1, "m": 3.0}, {"step": 2}, {"step": 4, "m": math.inf}]
    found = trend("x", "m", [one, other])
    assert (found.steps, found.values) == ((1.0, 2.0), (2.0, 5.0))
    assert trend("x", "other", [one]).steps == ()


def test_a_long_trend_is_averaged_in_stretches() -> None:
    found = trend("x", "m", [[{"step": n + 1, "m": float(n)} for n in range(3 * HEALTH_POINTS)]])
    assert len(found.steps) == HEALTH_POINTS
    assert (found.steps[0], found.values[0]) == (2.0, 1.0)
    assert (found.steps[-1], found.values[-1]) == (599.0, 598.0)


def test_panels_show_metrics_that_there_are() -> None:
    assert [name for names in HEALTH.values() for name in names if meaning(name) is None] == []


def outcome(arm: str, seed: int, state: str = "done") -> Outcome:
    point = Point(step=20, tokens=9, updates=8, seconds=1.0, right={"p0": True})
    return Outcome(
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


def compared(*outcomes: Outcome) -> Comparison:
    arms = (Arm(name="x", differences={}), Arm(name="y", differences={}))
    return Comparison(
        name="n", command="c", arms=arms, seeds=(1, 2), budget="steps", amount=20, outcomes=outcomes
    )


def test_answers_are_those_of_the_last_evaluation_with_a_seed_that_most_arms_finished(
    folder: Path,
) -> None:
    found = gather(
        folder,
        compared(outcome("y", 2), outcome("x", 1, "failed"), outcome("x", 2), outcome("y", 1)),
    )
    assert found.seed == 2
    assert {arm: a["text"] for arm, a in found.side_by_side[0].answers.items()} == {
        "x": "x2",
        "y": "y2",
    }
    assert found.texts == {"p0": ("p0?", "7")}


def test_kl_is_against_the_reference_where_an_arm_has_one(folder: Path) -> None:
    found = gather(folder, compared(*(outcome(a, s) for a in "xy" for s in (1, 2))))
    assert [(t.arm, t.metric, t.values) for t in found.health["KL"]] == [
        ("x", "objective/kl_avg", (1.5,)),
        ("y", "policy/approxkl_avg", (1.5,)),
    ]
    assert list(found.health) == ["KL"]


def test_folders_without_answers_and_steps_give_nothing_and_do_no_harm(tmp_path: Path) -> None:
    found = gather(tmp_path, compared(outcome("x", 1), outcome("y", 1, "failed")))
    assert (found.texts, found.seed, found.side_by_side, found.health) == ({}, None, (), {})
