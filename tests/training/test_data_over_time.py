"""Runs with a curriculum and replay: killed and resumed, explained, and corrected for age."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from tests.processes import forked, wait_until

SETTINGS = (
    "model.device=cpu", "train.steps=6", "save.every=2", "save.keep=10", "evaluate.every=0",
    "rollout.prompts_per_step=3", "rollout.group_size=4", "task.train_size=20",
    "curriculum.sampling=uncertain", "curriculum.drop_above=0.9", "replay.groups=2",
    "train.mini_batches=2",
)  # fmt: skip


def start(path: Path, *more: str) -> int:
    words = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return covey(["train", "--run", str(path), *words])


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


@pytest.mark.parametrize("more", [(), ("overlap.staleness=1",)], ids=["synchronous", "ahead"])
def test_kill_9_and_resuming_is_the_same_run(more: tuple[str, ...], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, *more) == 0
    child = forked(lambda: start(killed, *more), tmp_path / "output")
    wait_until((killed / "rollouts/000003.jsonl").exists)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert covey(["train", "--resume", str(killed)]) == 0
    assert rows(killed) == rows(whole)
    for step in range(1, 7):
        name = f"rollouts/{step:06d}.jsonl"
        assert (killed / name).read_text() == (whole / name).read_text()
    for name in ("prompts.json", "replay.jsonl"):
        last = f"checkpoints/000006/{name}"
        assert (killed / last).read_text() == (whole / last).read_text()
    a, b = (load_file(p / "checkpoints/000006/model.safetensors") for p in (killed, whole))
    assert all((a[k] == b[k]).all() for k in a)
    steps = rows(whole)
    assert max(row["data/replayed_groups"] for row in steps) == 2
    assert max(row["data/seen_prompts"] for row in steps) >= 8
    # A replayed group was sampled by older weights, and the correction sees that.
    replaying = [row for row in steps if row["data/replayed_groups"]]
    assert all(row["data/replay_age"] >= 1 for row in replaying)
    assert any(row["policy/correction_mean"] != 1 for row in replaying)
    text = (whole / "rollouts/000006.jsonl").read_text()
    recorded = [json.loads(line) for line in text.splitlines()]
    assert (
        sum(row.get("replayed", False) for row in recorded) == 4 * steps[-1]["data/replayed_groups"]
    )


def test_replay_without_a_correction_is_refused() -> None:
    config = load_config("demo", ["replay.groups=1", "train.old_logp=recompute"])
    assert resolve(config).objective.options["correction"] == "token_truncate"
    none = load_config(
        "demo", ["replay.groups=1", "train.old_logp=recompute", "objective.correction=none"]
    )
    with pytest.raises(ConfigError, match=r"replay\.groups = 1, the engine generates with older"):
        resolve(none)
