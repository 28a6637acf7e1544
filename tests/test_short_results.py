"""Results are short in a notebook: a line as text, a small table as HTML, with escaped text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import covey
from covey.evaluation import Estimate
from covey.evaluation.evaluate import Evaluation
from covey.evaluation.items import Item, ItemCompletion
from covey.types import Prompt

EVIL = "<script>alert(1)</script>\x1b[31m"


def train_result(**more: Any) -> covey.TrainResult:
    cell = {"value": 0.25, "low": 0.2, "high": 0.3}
    return covey.TrainResult(
        folder=Path("runs") / EVIL,
        step=6,
        metrics=[
            {"objective/scores": 0.5, "objective/verifiable_correct_rate": 0.25, "x" * 99: 1.0}
        ]
        * 99,
        evaluation={"prompts": 40, "greedy": cell, "parts": {"a": 1.0}},
        model="m" * 9999,
        tokenizer="t" * 9999,
        **more,
    )


def evaluation() -> Evaluation:
    completion = ItemCompletion(
        text="long " * 99, reward=1.0, tokens=9, finish="stop", success=True
    )
    prompt = Prompt(id="p", task="t", target="", messages=({"role": "user", "content": EVIL},))
    return Evaluation(
        prompts=40,
        estimates={"greedy": Estimate(0.25, 0.2, 0.3), EVIL: Estimate(0.5, 0.4, 0.6)},
        parts={},
        mean_tokens=12.5,
        unscored=0,
        items=(Item(prompt=prompt, greedy=completion),) * 40,
    )


def comparison() -> covey.CompareResult:
    run = {"arm": EVIL, "seed": 0, "state": "done", "metrics": ["long"] * 9999}
    return covey.CompareResult(folder=Path("c"), report={"runs": [run, {**run, "arm": "grpo"}]})


@pytest.mark.parametrize("made", [train_result, evaluation, comparison])
def test_a_result_is_short_and_escaped(made: Any) -> None:
    result = made()
    assert len(repr(result)) < 400
    assert "\n" not in repr(result)
    page = result._repr_html_()
    assert len(page) < 1000
    assert page.count("<table>") == page.count("</table>") == 1
    assert "<script>" not in page
    assert "\x1b" not in page


def test_a_result_shows_its_numbers() -> None:
    assert repr(train_result(best=Path("b"))).startswith("TrainResult(folder=")
    for shown in ("step=6", "last_reward=0.500", "25.0", "best=b"):
        assert shown in repr(train_result(best=Path("b")))
    assert "prompts=40" in repr(evaluation())
    assert "<th>greedy</th>" in evaluation()._repr_html_()
    assert "runs=2" in repr(comparison())
