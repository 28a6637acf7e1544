"""A run folder that someone else made cannot hang, fill the memory or show files outside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.errors import RunError
from covey.lab.ui.find_runs import find, overview
from covey.policy.checkpoint import load_policy
from covey.records.folder import RunFolder, list_runs, settings_of
from covey.records.records import (
    MOST_TEXT,
    last_row,
    read_bytes,
    read_object,
    read_text,
    usable_lines,
)
from covey.records.records import SAVED as SAVED_ROW
from covey.rollout.queue import FILE as IN_FLIGHT
from covey.rollout.queue import read_in_flight


def make(path: Path, kind: str, outside: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MOST_TEXT + 1)  # sparse
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "large", "folder"])
def test_only_ordinary_files_of_a_run_are_read(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "secret.toml"
    outside.write_text('[task]\nname = "secret"\n')
    bad, good = tmp_path / "runs" / "bad", tmp_path / "runs" / "good"
    for run in (bad, good):
        run.mkdir(parents=True)
        (run / "environment.json").write_text("{}")
    (good / "config.toml").write_text('[task]\nname = "fine"\n')
    make(bad / "config.toml", kind, outside)
    with pytest.raises(RunError, match=r"config\.toml"):
        read_text(bad / "config.toml")
    assert settings_of(RunFolder(bad)) == {}
    names = {run.path.name: settings_of(run) for run in list_runs(tmp_path / "runs")}
    assert names["good"] == {"task": {"name": "fine"}}
    places = find([tmp_path / "runs"])
    shown = {place.path.name: overview(place)["task"] for place in places.values()}
    assert shown == {"good": "fine", "bad": None}
    make(bad / "steps.jsonl", "pipe", outside)
    assert last_row(bad / "steps.jsonl") == {}
    with pytest.raises(RunError, match="not a regular file"):
        read_bytes(bad / "steps.jsonl")


def test_covey_runs_ends_beside_a_pipe(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "a" / "config.toml")
    (tmp_path / "b" / "config.toml").write_text('[task]\nname = "fine"\n')
    command = [sys.executable, "-m", "covey", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "line", [DEEP, '{"ticket": [1e999, 0, 0]}', '{"ticket": 1}', '{"ticket": [1, 0, 0]}', "\x00"]
)
def test_damaged_rollouts_in_flight_are_one_error(line: str, tmp_path: Path) -> None:
    (tmp_path / IN_FLIGHT).write_text(line + "\n")
    with pytest.raises(RunError, match=IN_FLIGHT):
        read_in_flight(tmp_path, [], seed=0, count=2)


@pytest.mark.parametrize("text", [DEEP, '{"version": 1, "step": 1e999}', '{"version": 1e999}'])
def test_a_damaged_state_of_a_checkpoint_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "covey.json").write_text(text)
    with pytest.raises(RunError, match=r"covey\.json"):
        load_policy(None, tmp_path)  # the state is read before anything of the policy


def test_an_infinite_step_is_a_damaged_line(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.jsonl"
    file.write_text('{"step": 1e999}\n{"step": 3}\n' + DEEP + "\n")
    notes: list[str] = []
    assert usable_lines(file, SAVED_ROW, notes.append) == [{"step": 3}]
    assert len(notes) == 1
    file.write_text(json.dumps({"a": 1}))
    assert read_object(file) == {"a": 1}
