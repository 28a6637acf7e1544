from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from covey.records.provenance import PACKAGES, describe_environment


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_it_says_what_it_was_told_and_what_the_machine_is() -> None:
    environment = describe_environment(seed=7, device="cuda:1", threads=3)
    told = {name: environment[name] for name in ("seed", "device", "threads")}
    assert told == {"seed": 7, "device": "cuda:1", "threads": 3}
    assert environment["command"] == sys.argv
    assert environment["python"] == platform.python_version()
    assert environment["platform"] == platform.platform()
    assert environment["cores"] == os.cpu_count()


def test_the_start_is_the_present_moment_in_utc() -> None:
    started = datetime.fromisoformat(describe_environment(0, "cpu", 1)["started"])
    assert started.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - started) < timedelta(seconds=30)


def test_the_packages_have_their_installed_versions() -> None:
    packages = describe_environment(0, "cpu", 1)["packages"]
    assert set(packages) == set(PACKAGES) >= {"covey", "torch", "transformers", "numpy"}
    assert packages == {name: importlib.metadata.version(name) for name in PACKAGES}


def test_it_reads_back_from_json_as_it_is() -> None:
    environment = describe_environment(0, "cpu", 1)
    assert json.loads(json.dumps(environment)) == environment


def test_git_names_the_commit_and_whether_anything_changed(repository: Path) -> None:
    commit = git("rev-parse", "HEAD")
    assert describe_environment(0, "cpu", 1)["git"] == {"commit": commit, "changed": False}
    (repository / "file").write_text("2")
    assert describe_environment(0, "cpu", 1)["git"] == {"commit": commit, "changed": True}
    git("commit", "-q", "-a", "-m", "second")
    later = describe_environment(0, "cpu", 1)["git"]
    assert later == {"commit": git("rev-parse", "HEAD"), "changed": False}
    assert later["commit"] != commit


def test_outside_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment(0, "cpu", 1)["git"]["commit"] is None


def test_without_git_there_is_no_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    assert describe_environment(0, "cpu", 1)["git"]["commit"] is None
