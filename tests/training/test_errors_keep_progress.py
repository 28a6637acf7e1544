"""A run that ends by an error saves its last complete step, and resumes as if nothing happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.config import load_config, to_toml
from covey.config.resolve import resolve
from covey.errors import RewardError
from covey.loop import train
from covey.records.folder import RunFolder
from covey.records.trackers import Tracker
from covey.rewards import Score, ThinkAnswer
from covey.run import Run
from covey.stopping import StopSignal
from covey.types import Prompt
from tests.trackers import Notes

CONFIG = resolve(
    load_config(
        "arithmetic",
        ["train.steps=4", "rollout.prompts_per_step=4", "rollout.group_size=4", "save.every=0",
         "rollout.max_tokens=40", "evaluate.every=2", "evaluate.prompts=4"],
    )
)  # fmt: skip


class Breaks:
    """The usual reward, which raises from some call on. Evaluations call it too."""

    quick, version, bounds = True, 1, (0.0, 1.0)

    def __init__(self, after: float = float("inf")) -> None:
        self.after, self.calls = after, 0

    def __call__(self, prompt: Prompt, text: str) -> Score:
        self.calls += 1
        if self.calls > self.after:
            raise KeyError("grade")
        return ThinkAnswer()(prompt, text)


LINE = inspect.getsourcelines(Breaks.__call__)[1] + 3


class Raises(Tracker):
    def step(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 3:
            raise ZeroDivisionError("in a callback")


def trained(path: Path, reward: Breaks, *more: Tracker) -> list[str]:
    """Train, or resume what is there; return the notes."""
    run = RunFolder(path) if path.exists() else RunFolder.create(path, to_toml(CONFIG), {})
    notes = Notes()
    with closing(Run.build(CONFIG, reward)) as parts:
        try:
            train(parts, run, [notes, *more], StopSignal())
        finally:
            trained.notes = notes.notes  # type: ignore[attr-defined]
    return notes.notes


def steps_of(path: Path) -> list[dict[str, Any]]:
    rows = RunFolder(path).steps()
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "reward_id"))} for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    trained(path, Breaks())
    return path


@pytest.fixture
def same_as(whole: Path) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        assert steps_of(path) == steps_of(whole)
        runs = [RunFolder(p) for p in (path, whole)]
        assert runs[0].evaluations() == runs[1].evaluations()
        ends = [load_file(r.checkpoints()[-1][1] / "model.safetensors") for r in runs]
        assert all(ends[0][name].equal(ends[1][name]) for name in ends[1])

    return check


def test_an_error_in_the_reward(tmp_path: Path, same_as: Callable[[Path], None]) -> None:
    path = tmp_path / "run"
    reward = Breaks()

    class AfterThree(Tracker):
        def step(self, metrics: Mapping[str, Any]) -> None:
            if metrics["step"] == 3:
                reward.after = 0

    with pytest.raises(RewardError, match=rf"KeyError: 'grade' \({__file__}, line {LINE}\)"):
        trained(path, reward, AfterThree())
    run = RunFolder(path)
    assert [step for step, _ in run.checkpoints()] == [3]
    assert f"saved step 3; resume with: covey train --resume {path}" in trained.notes  # type: ignore[attr-defined]
    failure = (path / "failure.txt").read_text()
    assert "Traceback" in failure
    assert f'line {LINE}, in __call__\n    raise KeyError("grade")' in failure
    trained(path, Breaks())
    assert not (path / "failure.txt").exists()  # or a later stop would look like a failure
    same_as(path)


def test_an_error_in_an_evaluation(
    tmp_path: Path, same_as: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def fails(*arguments: object, **named: object) -> None:
        raise OSError("the disk of the data is away")

    class Fails(Tracker):
        def step(self, metrics: Mapping[str, Any]) -> None:
            if metrics["step"] == 2:
                monkeypatch.setattr("covey.run.evaluate", fails)

    with pytest.raises(OSError, match="is away"):
        trained(path, Breaks(), Fails())
    monkeypatch.undo()
    assert [row["step"] for row in RunFolder(path).evaluations()] == [0]
    assert [step for step, _ in RunFolder(path).checkpoints()] == [2]
    trained(path, Breaks())
    assert [row["step"] for row in RunFolder(path).evaluations()] == [0, 2, 4]
    same_as(path)


def test_an_error_in_a_callback(tmp_path: Path, same_as: Callable[[Path], None]) -> None:
    path = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        trained(path, Breaks(), Raises())
    assert [step for step, _ in RunFolder(path).checkpoints()] == [3]
    trained(path, Breaks())
    same_as(path)


def test_the_command_line_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reward = "calls = []\ndef strict(prompt, text):\n    calls.append(text)\n" \
        "    return 1 / max(0, 9 - len(calls))\nstrict.quick = True\n"  # fmt: skip
    Path("mine.py").write_text(reward)
    settings = ["train.steps=4", "rollout.prompts_per_step=2", "rollout.group_size=4",
                "rollout.max_tokens=8", "evaluate.every=0", "reward.name=mine:strict"]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    assert covey(["train", "--run", "r", *words]) == 1
    out = capsys.readouterr()
    assert "saved step 1; resume with: covey train --resume r" in out.out
    assert "ZeroDivisionError" in out.err
    assert f"{tmp_path}/mine.py, line 4" in out.err.replace("\n", "")
