"""The log of reward changes: recorded when a run starts, measured from the runs' evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run as covey
from covey.lab.report.write import write_run_report
from covey.records.folder import RunFolder
from covey.records.reward_changes import FILE, logged_change, read_change, record_change, reward_log

OLD, NEW = "mix@2#aaaaaaaaaaaa", "mix@2#bbbbbbbbbbbb"


def made(
    path: Path,
    reward: str,
    *,
    weight: float = 0.5,
    task: str = "sums",
    started: int = 0,
    **more: Any,
) -> RunFolder:
    config = (
        f"[task]\nname = '{task}'\n[reward]\nname = 'mix'\n[reward.parts.form]\nweight = {weight}\n"
    )
    environment = {"started": f"2026-01-01T00:00:{started:02d}", "reward": reward, **more}
    return RunFolder.create(path, config, environment)


def evaluate(run: RunFolder, value: float, form: float, margin: float = 0.02) -> None:
    estimate = {"value": value, "low": value - margin, "high": value + margin}
    run.log_evaluation({"step": 9, "prompts": 50, "greedy": estimate, "parts": {"form": form}})


def test_a_change_has_settings_reason_and_both_effects(tmp_path: Path) -> None:
    before = made(tmp_path / "a-1", OLD, started=1, evaluation_reward="x")
    after = made(tmp_path / "a-2", NEW, weight=0.2, started=2, evaluation_reward="x")
    change = record_change(after, "too much weight on the form", "higher accuracy")
    assert change == read_change(after)
    assert change is not None
    assert change.settings == {"parts.form.weight": ("0.5", "0.2")}
    assert change.what == "parts.form.weight 0.5 -> 0.2"
    logged = logged_change(after)
    assert logged is not None
    assert "a-1 has no evaluation and a-2 has no evaluation" in logged.observed_effect
    evaluate(before, 0.40, 0.75)
    evaluate(after, 0.50, 0.5)
    (logged,) = reward_log(tmp_path)
    assert logged.observed_effect == (
        "greedy 40.0% -> 50.0% (+10.0 points), parts/form 0.750 -> 0.500 (-0.250)"
    )
    assert logged.row()["reason"] == "too much weight on the form"
    assert logged.row()["expected_effect"] == "higher accuracy"


def test_overlapping_intervals_and_other_evaluations_are_said(tmp_path: Path) -> None:
    before = made(tmp_path / "a-1", OLD, started=1, evaluation_reward="x")
    after = made(tmp_path / "a-2", NEW, started=2, evaluation_reward="y")
    record_change(after, "", "")
    evaluate(before, 0.40, 0.5)
    evaluate(after, 0.42, 0.5)
    logged = logged_change(after)
    assert logged is not None
    assert "(+2.0 points, within noise)" in logged.observed_effect
    assert logged.observed_effect.endswith("each run was evaluated with its own reward")
    assert logged.change.what == "the source of the reward"


def test_only_the_previous_run_of_the_same_task_counts(tmp_path: Path) -> None:
    made(tmp_path / "other", NEW, task="code", started=9)
    made(tmp_path / "sft", "?", started=8, kind="sft")
    made(tmp_path / "a-1", "mix@1#cccccccccccc", started=1)
    made(tmp_path / "a-2", OLD, started=2)
    same = made(tmp_path / "a-10", OLD, started=3)
    assert record_change(same, "", "") is None
    assert not (same.path / FILE).exists()
    change = record_change(made(tmp_path / "b", NEW, started=4), "", "")
    assert change is not None
    assert (change.previous_run, change.before) == ("a-10", OLD)
    first = made(tmp_path / "alone" / "a-1", NEW)
    assert record_change(first, "", "") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": 3}', "\xff"])
def test_a_damaged_record_is_no_change(text: str, tmp_path: Path) -> None:
    run = made(tmp_path / "a-1", OLD)
    (run.path / FILE).write_text(text, encoding="latin-1")
    assert read_change(run) is None
    assert reward_log(tmp_path) == []


def test_two_runs_with_different_rewards_tell_and_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        "train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.every=1",
        "evaluate.prompts=4", "rollout.max_tokens=8", "model.device=cpu",
    )  # fmt: skip
    changes = ("reward.format=0.3", "reward_change.reason=reward the format more")
    for more in ((), changes):
        words = [w for s in (*small, *more) for w in ("--set", s)]
        assert covey(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "the reward differs from that of arithmetic-grpo-1: format 0.1 -> 0.3" in said
    assert covey(["rewards", "log"]) == 0
    assert "reason: reward the format more" in capsys.readouterr().out
    assert covey(["runs", "show", "runs/arithmetic-grpo-2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["reward_change"]
    assert shown["settings"] == {"format": ["0.1", "0.3"]}
    assert shown["observed_effect"].startswith("greedy ")
    run = RunFolder.open(Path("runs/arithmetic-grpo-2"))
    for file in write_run_report(run, tmp_path)[:2]:
        assert "reward the format more" in file.read_text()
