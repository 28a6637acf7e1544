"""Runs of earlier versions, whose files have sections that were removed since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.config import load_config
from covey.errors import ConfigError
from covey.lab.report import write_run_report
from covey.records.folder import RunFolder

SECTION = '\n[reward_change]\nreason = "less weight on the form"\nexpected_effect = ""\n'
SMALL = (
    "train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.every=1",
    "evaluate.prompts=4", "rollout.max_tokens=8", "model.device=cpu", "save.every=1",
)  # fmt: skip


def test_a_run_with_the_section_of_reward_changes_is_read_reported_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    words = [word for setting in SMALL for word in ("--set", setting)]
    assert covey(["train", "--run", str(path), *words]) == 0
    run = RunFolder.open(path)
    text = run.config_file.read_text() + SECTION
    run.config_file.write_text(text)
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps({**environment, "config": text}))
    (path / "reward_change.json").write_text('{"reason": "less weight on the form"}')

    capsys.readouterr()
    assert covey(["runs", "show", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["evaluations"]) == 2
    assert covey(["runs", "show", str(path)]) == 0
    assert covey(["runs", "check", str(path)]) == 0
    assert write_run_report(run, tmp_path)[0].is_file()
    assert covey(["eval", str(path), "--json"]) == 0
    assert covey(["train", "--resume", str(path), "--set", "train.steps=2"]) == 0
    assert [row["step"] for row in run.steps()] == [1, 2]
    assert "reward differs" not in capsys.readouterr().out


def test_a_file_may_have_the_section_but_it_cannot_be_set(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("seed = 3" + SECTION)
    assert load_config(str(tmp_path / "own.toml")) == load_config(None, ["seed=3"])
    with pytest.raises(ConfigError, match=r"reward_change\.reason"):
        load_config(None, ["reward_change.reason=x"])


def test_runs_with_different_rewards_in_a_folder_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for setting in SMALL for word in ("--set", setting)]
    for more in ([], ["--set", "reward.format=0.3"]):
        assert covey(["train", *words, *more]) == 0
    assert "reward_change" not in capsys.readouterr().out
    assert not list(tmp_path.rglob("reward_change.json"))
