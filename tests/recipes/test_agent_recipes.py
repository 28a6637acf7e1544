"""The recipes with environments: they plan, and run in a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.config import load_config, load_smoke
from covey.config.resolve import resolve
from covey.lab.plan.findings import findings
from tests.environments.scripted import reader

AGENTS = {"agent-calculator": "calculator", "agent-python": "python", "agent-search": "search"}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_recipe_has_nothing_that_the_plan_warns_of(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve(load_config(name))
    assert run(["plan", name]) in (0, 2)  # without access to the hub, the run cannot start
    assert capsys.readouterr().out.startswith(f"{config.train.steps} training steps.")
    assert config.environment.name == AGENTS[name]
    assert [f.title for f in findings(config) if f.kind == "risk"] == []


@pytest.mark.parametrize("name", AGENTS)
def test_the_embedded_model_gets_arithmetic_without_an_environment(name: str) -> None:
    config, _ = load_smoke(name, ["model.path=embedded"])
    assert (config.task.name, config.environment.name) == ("arithmetic", "none")


@pytest.mark.parametrize("name", ["agent-python", "agent-search"])
def test_an_agent_recipe_runs_with_its_environment(name: str, tmp_path: Path) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    reader().model.save_pretrained(model)
    reader().tokenizer.save_pretrained(model)
    smaller = ["--set", "rollout.max_tokens=8", "--set", "evaluate.prompts=2"]
    command = ["train", name, "--model", str(model), "--smoke", "--run", str(folder), *smaller]
    assert run(command) == 0
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [row["objective/unscored"] for row in steps] == [0, 0]
