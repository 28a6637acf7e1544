"""`covey runs`: the table of runs, and run folders of version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.cli.runs import fitting_table, table_width
from covey.config import load_config
from covey.records.folder import RunFolder

ROWS = [
    {"run": "runs/arithmetic-grpo-1", "started": "2026-11-16 14:00", "model": "embedded",
     "state": "done", "steps": 4, "reward": 0.1772, "greedy_before": 0.219,
     "greedy_now": 0.219, "checkpoint": 4},
    {"run": "runs/warm", "started": "-", "model": "small", "state": "stopped", "steps": 3, "reward": None, "greedy_before": 0.25, "greedy_now": 0.25,
     "checkpoint": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (200, ["run", "started", "model", "state", "steps", "reward", "greedy before",
               "greedy now", "checkpoint"]),
        (100, ["run", "started", "state", "steps", "reward", "greedy now"]),
        (80, ["run", "state", "steps", "reward", "greedy now"]),
        (60, ["run", "state", "steps", "greedy now"]),
        (50, ["run", "steps", "greedy now"]),
        (40, ["run", "greedy now"]),
        (30, ["run"]),
        (10, ["run"]),  # here a name is folded
    ],
)  # fmt: skip
def test_a_narrow_terminal_has_fewer_columns_and_names_in_full(
    width: int, columns: list[str]
) -> None:
    table = fitting_table(ROWS, width)
    assert [column.header for column in table.columns] == columns
    assert table_width(table) <= max(width, 26)


CONFIG_0_1 = """
seed = 3
[objective]
name = "gspo"
low = 0.0003
high = 0.0004
[rollout]
prompts = 2
samples = 2
slots = 64
[select]
dynamic = true
max_age = 4
[train]
steps = 2
token_budget = 4096
budget = "tokens"
amount = 1000
[save]
review_every = 1
review_answers = 5
"""


@pytest.fixture
def of_0_1(tmp_path: Path) -> Path:
    """Write the settings of a run as version 0.1 left them."""
    path = tmp_path / "runs/old-1"
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG_0_1)
    (path / "environment.json").write_text('{"threads": 2, "command": ["covey", "train"]}')
    return path


def test_the_settings_of_a_run_of_0_1_are_translated(of_0_1: Path) -> None:
    config = load_config(str(of_0_1 / "config.toml"))
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (2, 2)
    assert config.engine.max_concurrent == 64
    assert (config.filter.dynamic_sampling, config.overlap.max_staleness) == (True, 4)
    assert config.train.stop_after.tokens == 1000
    assert config.train.micro_batch_tokens == 4096
    assert (config.save.samples_every, config.save.samples_shown) == (1, 5)
    assert config.objective.options == {"clip_low": 0.0003, "clip_high": 0.0004}


def test_runs_come_in_natural_order_with_their_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = 'train = {steps = 2}\nmodel = {path = "a/Qwen3"}\n'
    for number in (10, 2, 1):
        folder = RunFolder.create(
            tmp_path / f"run-{number}", config, {"started": "2026-11-16T14:00:00"}
        )
        for step in range(1, 1 + (2 if number == 2 else 1)):
            folder.log_step({"step": step, "objective/scores": 0.5})
        with folder.new_checkpoint(2 if number == 2 else 1):
            pass
    (tmp_path / "run-1" / "failure.txt").write_text("x")
    assert run(["runs", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [Path(row["run"]).name for row in rows] == ["run-1", "run-2", "run-10"]
    assert [row["state"] for row in rows] == ["failed", "done", "stopped"]
    assert {(row["model"], row["started"]) for row in rows} == {("Qwen3", "2026-11-16 14:00")}


def test_a_run_without_evaluations_is_shown_with_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", "", {})
    folder.log_step({"step": 7, "objective/scores": 0.625})
    assert run(["runs", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    assert "0.625" in shown
    assert "This run has no evaluations (evaluate.every)." in shown


def test_a_run_with_a_section_that_is_not_a_table_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("model = 'x'\ntrain = 5\n")
    assert run(["runs", str(tmp_path), "--json"]) == 0
    assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["-"]
