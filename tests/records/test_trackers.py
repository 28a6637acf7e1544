"""Trackers: each is given what a run reports; the run folder always is one."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from covey.records.folder import RunFolder
from covey.records.trackers import JsonlTracker, Tracker, Trackers
from covey.records.trackers.console import ConsoleTracker, LiveTracker, console_tracker

METRICS = {
    "step": 1, "objective/scores": 0.5, "objective/verifiable_correct_rate": 0.25, "val/sequence_lengths": 12.0,
    "time/tokens_per_second": 1000.0,
}  # fmt: skip


class Kept(Tracker):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        self.calls.append(("started", (steps, done, rollouts)))

    def sampled(self, count: int) -> None:
        self.calls.append(("sampled", count))

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("step", dict(metrics)))

    def evaluation(self, step: int, evaluation: Any) -> None:
        self.calls.append(("evaluation", step))

    def table(self, name: str, step: int, rows: Any) -> None:
        self.calls.append((name, (step, list(rows))))

    def note(self, text: str) -> None:
        self.calls.append(("note", text))

    def close(self) -> None:
        self.calls.append(("close", None))


def report_all(tracker: Tracker) -> None:
    evaluation: Any = SimpleNamespace(
        row=lambda: {"prompts": 4},
        estimates={},
        prompts=4,
        unscored=0,
        distinct_answers=1,
        best_constant=None,
        baselines=None,
        graded=False,
    )
    tracker.started(steps=2, done=0, rollouts=8)
    tracker.sampled(3)
    tracker.step(METRICS)
    tracker.table("evaluations", 1, [{"id": "p"}])
    tracker.evaluation(1, evaluation)
    tracker.note("look")
    tracker.close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "", {})


def test_several_trackers_are_each_given_everything_in_order() -> None:
    trackers = [Kept(), Kept()]
    report_all(Trackers(trackers))
    names = ["started", "sampled", "step", "evaluations", "evaluation", "note", "close"]
    assert [[name for name, _ in t.calls] for t in trackers] == [names, names]
    assert trackers[0].calls == trackers[1].calls


def test_a_tracker_overrides_only_what_it_shows() -> None:
    report_all(Tracker())


def test_the_run_folder_gets_steps_evaluations_and_tables(run: RunFolder) -> None:
    report_all(JsonlTracker(run))
    assert run.steps() == [METRICS]
    (line,) = (run.path / "eval.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "prompts": 4}
    assert (run.path / "evaluations/000001.jsonl").read_text() == '{"id":"p"}\n'


def test_a_pipe_gets_plain_lines(run: RunFolder) -> None:
    screen = io.StringIO()
    tracker = console_tracker(run, Console(file=screen, width=200))
    assert type(tracker) is ConsoleTracker
    report_all(tracker)
    lines = screen.getvalue().splitlines()
    assert lines[0] == f"training: 2 steps of 8 rollouts, in {run.path}"
    assert lines[1].startswith("step 1/2  reward 0.500  success 25.0%  length 12  no kl")
    assert lines[-1] == "look"


def test_the_time_left_comes_from_all_steps_however_long_they_are(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for width, shown in (
        (120, "reward 0.500  success 25.0%"),
        (60, "reward 0.500  25%"),
        (40, "reward 0.500  25%"),
    ):
        screen = Console(file=io.StringIO(), force_terminal=True, width=width)
        tracker = LiveTracker(run, screen)
        tracker.started(steps=11, done=0, rollouts=8)
        now += 90.0  # longer than the window of rich's own estimate
        tracker.step(METRICS)
        fields = tracker.progress.tasks[0].fields
        assert fields["left"] == "15:00"
        assert fields["summary"].startswith(shown)
        tracker.progress.refresh()
        assert shown in screen.file.getvalue()  # type: ignore[attr-defined]
        tracker.close()
