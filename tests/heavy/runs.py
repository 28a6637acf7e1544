"""Runs of `covey train` in a process, and killing processes that belong to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SECONDS = 1500.0
"""After this a run hangs. It takes one or two minutes on an idle machine."""
SETTINGS = {
    "train.steps": 30,
    "evaluate.every": 30,
    "evaluate.prompts": 256,
    "save.every": 0,
    "save.rollouts": "false",
}
"""The embedded model rises by more than 20 points."""


class Run:
    """A run in a process of its own."""

    def __init__(
        self, folder: Path, *words: str, launcher: Sequence[str] = ("-m", "covey"), **settings: Any
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        pairs = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        pairs = [f"{key}={value}" for key, value in SETTINGS.items()] + pairs
        command = [sys.executable, *launcher, "train", "arithmetic", "--run", str(folder)]
        command += [word for pair in pairs for word in ("--set", pair)]
        self.output = folder.with_suffix(".txt")
        # Ray gives its workers a low priority, which starves them on a busy machine.
        own = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        environment = {**os.environ, **own, "COVEY_TEST_MARK": self.mark}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *words], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step so far."""
        return _lines(self.folder / "steps.jsonl")

    def text(self) -> str:
        """What it printed, in one line."""
        return " ".join(self.output.read_text().split())

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        self._wait_until(lambda: len(self.steps()) >= step)

    def wait_for_text(self, words: str) -> None:
        """Wait until it has printed some words."""
        self._wait_until(lambda: words in self.text())

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < limit, self.text()
            time.sleep(0.1)

    def processes(self, word: str) -> list[int]:
        """The processes of this run whose command line holds a word."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if word in command and self.mark in (folder / "environ").read_text():
                    found.append(int(folder.name))
            except (OSError, UnicodeDecodeError):
                continue
        return sorted(found)

    def kill(self, word: str) -> None:
        """kill -9 of one of them."""
        os.kill(self.processes(word)[0], signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()

    def greedy(self) -> list[dict[str, float]]:
        """The greedy accuracy of each evaluation, with its interval."""
        return [line["greedy"] for line in _lines(self.folder / "eval.jsonl")]


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def check_run(run: Run, native: Run, restarts: int = 1) -> None:
    """Check a run in which engines were killed, against the native one."""
    assert run.end() == 0, run.text()
    steps, wanted = run.steps(), native.steps()
    key = "rollout/trained_groups"
    assert [step[key] for step in steps] == [step[key] for step in wanted]
    assert sum(step["engine/restarts"] for step in steps) == restarts
    assert max(step["debug/sampler_logp_diff_max"] for step in steps) < 1e-4
    before, after = native.greedy()
    assert after["value"] > before["value"] + 0.2
    assert run.greedy()[0] == before
    assert run.greedy()[1]["high"] >= after["low"]
    assert run.greedy()[1]["low"] <= after["high"]
