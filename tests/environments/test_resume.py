"""A run with slow tools that is killed in the middle of its episodes resumes to the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.records.folder import RunFolder
from tests.processes import Forked, wait_until

STEPS = 3
SETTINGS = (
    f"train.steps={STEPS}", "save.every=1", "save.keep=10", "evaluate.every=0", "model.device=cpu",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "environment.call_format=tags",
    "environment.max_tokens=128", "environment.name=tests.environments.worlds:SlowCalculator",
)  # fmt: skip
TRUST = ("--trust", "tests.environments.worlds")


def arguments(path: Path) -> list[str]:
    overrides = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["train", "agent-calculator", "--run", str(path), *TRUST, *overrides]


def lines(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_kill_9_in_an_episode_and_resuming_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed, marks = tmp_path / "whole", tmp_path / "killed", tmp_path / "marks"
    monkeypatch.setenv("MARKS", str(marks))
    assert covey(arguments(whole)) == 0

    child = Forked(lambda: covey(arguments(killed)), tmp_path / "output")
    wait_until(lambda: len(lines(killed / "steps.jsonl")) == 1 or child.poll() is not None)
    before = marks.stat().st_size
    wait_until(lambda: marks.stat().st_size > before + 3)  # the tools of step 2 are at work
    child.kill()
    assert child.wait() == -9
    assert len(lines(killed / "steps.jsonl")) == 1
    assert covey(["train", "--resume", str(killed), *TRUST]) == 0

    assert lines(killed / "steps.jsonl") == lines(whole / "steps.jsonl")
    for step in range(1, STEPS + 1):
        name = f"rollouts/{step:06d}.jsonl"
        assert (killed / name).read_text() == (whole / name).read_text()
    weights = [load_file(p / f"checkpoints/{STEPS:06d}/model.safetensors") for p in (whole, killed)]
    assert all((weights[0][k] == weights[1][k]).all() for k in weights[0])

    rows = RunFolder(whole).rollouts(STEPS)
    calls = [row for row in rows if len(row["turns"]) == 3]
    assert calls  # some rollouts called the tool, and its tokens were not trained
    for row in calls:
        tool = row["turns"][1]
        assert not any(row["segments"][0]["trained"][tool["start"] : tool["stop"]])
