"""`covey tasks` and `covey recipes`."""

from __future__ import annotations

import json

import pytest

from covey.cli.main import run
from covey.config import recipe_names
from covey.tasks.registry import TASKS


def test_tasks_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tasks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(TASKS)
    assert all(row["text"] for row in rows)
    assert run(["tasks", "jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "task.train_file = (must be given)" in shown
    assert "task.held_out_share = 0.1" in shown
    assert run(["tasks", "jsnl"]) == 2
    assert "did you mean 'jsonl'" in capsys.readouterr().err


def test_recipes_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == recipe_names()
    assert all(len(row["text"]) > 20 for row in rows)
    assert {row["name"]: row["algorithm"] for row in rows}["arithmetic"] == "grpo"
