"""A signal acts while a run waits for others, and what was done before is saved."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.config import load_config, to_toml
from covey.config.resolve import resolve
from covey.loop import train
from covey.records.folder import RunFolder
from covey.run import Run
from covey.scoring import Job, Pending, Scorer, ScoreResult
from covey.stopping import GivenUp, may_be_given_up, stop_signal
from tests.processes import forked, wait_until
from tests.trackers import Notes
from tests.training.test_resume import wait

SETTINGS = (
    "model.device=cpu", "train.steps=4", "train.mini_batches=1", "save.every=4",
    "evaluate.every=0", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=6",
)  # fmt: skip
ANSWERS = 4
"""Of a step."""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up waits for others after half a second, and not after three."""
    monkeypatch.setattr("covey.stopping.GRACE_SECONDS", 0.5)


@dataclass
class NeverAnswers:
    """A scorer whose server goes away after some completions."""

    scorer: Scorer
    left: int
    whole_groups: bool = False

    @property
    def identity(self) -> str:
        return self.scorer.identity

    @property
    def bounds(self) -> tuple[float, float]:
        return self.scorer.bounds

    def submit(self, job: Job) -> Pending:
        self.left -= 1
        never: Future[list[ScoreResult]] = Future()
        return self.scorer.submit(job) if self.left >= 0 else never

    def events(self) -> list[str]:
        return self.scorer.events()

    def close(self) -> None:
        self.scorer.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_server_is_away_ends_soon_with_its_last_step_saved(
    number: signal.Signals, tmp_path: Path
) -> None:
    config = resolve(load_config("arithmetic", SETTINGS))
    parts = Run.build(config)
    path = tmp_path / "run"
    folder = RunFolder.create(path, to_toml(config), {})

    def work() -> int:
        stuck = replace(parts, scorer=NeverAnswers(parts.scorer, left=2 * ANSWERS))
        with stop_signal() as stop:
            assert train(stuck, folder, [Notes()], stop) == 2
        return stop.exit_code

    child = forked(work, tmp_path / "output")
    wait_until(lambda: len(folder.steps()) == 2)
    time.sleep(0.2)
    os.kill(child, number)
    began = time.monotonic()
    assert wait(child) == 128 + number, (tmp_path / "output").read_text()
    assert time.monotonic() - began < 60  # a few seconds, on a machine with nothing else to do
    assert [step for step, _ in folder.checkpoints()] == [2]
    assert covey(["train", "--resume", str(path)]) == 0
    assert [row["step"] for row in folder.steps()] == [1, 2, 3, 4]
    assert not (path / "superseded").exists()


def test_only_a_wait_for_others_is_given_up() -> None:
    with stop_signal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        ends = time.monotonic() + 0.8
        while time.monotonic() < ends:  # work of our own continues
            pass
        with pytest.raises(GivenUp), may_be_given_up():
            time.sleep(60)
        time.sleep(0.3)
    assert (stop.received, stop.exit_code) == ("SIGTERM", 143)


def test_a_second_signal_ends_the_process_at_once() -> None:
    with stop_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


def test_a_signal_ends_an_evaluation_which_the_resumed_run_makes_up_for(tmp_path: Path) -> None:
    settings = ["evaluate.every=2", "evaluate.prompts=4", "train.steps=2"]
    config = resolve(load_config("arithmetic", [*SETTINGS, *settings]))
    parts = Run.build(config)
    path = tmp_path / "run"
    folder = RunFolder.create(path, to_toml(config), {})

    def work() -> int:
        stuck = replace(parts, eval_scorer=NeverAnswers(parts.eval_scorer, left=4))
        with stop_signal() as stop:
            train(stuck, folder, [Notes()], stop)
        return stop.exit_code

    child = forked(work, tmp_path / "output")
    wait_until(lambda: len(folder.steps()) == 2)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    began = time.monotonic()
    assert wait(child) == 128 + signal.SIGTERM, (tmp_path / "output").read_text()
    assert time.monotonic() - began < 60
    assert [step for step, _ in folder.checkpoints()] == [2]
    assert [row["step"] for row in folder.evaluations()] == [0]
    assert covey(["train", "--resume", str(path)]) == 0
    assert [row["step"] for row in folder.evaluations()] == [0, 2]
