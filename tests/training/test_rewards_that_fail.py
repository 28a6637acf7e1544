"""A completion that cannot be scored is counted, shown, and never a zero."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import RewardError
from covey.loop import train
from covey.records.folder import RunFolder
from covey.rewards import Score, ThinkAnswer
from covey.run import Run
from covey.stopping import StopSignal
from covey.types import Prompt
from tests.trackers import Notes

QUICK = ["train.steps=1", "rollout.prompts_per_step=4", "rollout.group_size=4", "evaluate.every=0"]


class Fails:
    """The usual reward, which for every n-th completion does something else."""

    quick = True
    version = 1
    bounds = (0.0, 1.0)

    def __init__(self, every: int, how: str) -> None:
        self.every, self.how, self.calls = every, how, 0

    def __call__(self, prompt: Prompt, text: str) -> Score:
        self.calls += 1
        if self.calls % self.every:
            return ThinkAnswer()(prompt, text)
        if self.how == "raises":
            raise KeyError("no such thing")
        return Score(reward=math.nan if self.how == "nan" else math.inf, success=True)


def parts_with(reward: Fails, *settings: str) -> Run:
    config = resolve(load_config("arithmetic", [*QUICK, *settings]))
    return Run.build(config, reward)


@pytest.mark.parametrize("how", ["raises", "nan", "inf"])
def test_a_few_failures_are_counted_and_shown(how: str, tmp_path: Path) -> None:
    parts = parts_with(Fails(8, how), "scoring.max_unscored=0.2")
    run, reporter = RunFolder.create(tmp_path / "run", "", {}), Notes()
    train(parts, run, [reporter], StopSignal())
    (metrics,) = run.steps()
    rollouts = run.rollouts(1)
    unscored = [a for a in rollouts if a["reward"] is None]
    assert metrics["objective/unscored"] == len(unscored) == 2
    assert all(a["advantage"] == 0.0 and a["success"] is None for a in unscored)
    scored = [a["reward"] for a in rollouts if a["reward"] is not None]
    assert metrics["objective/scores"] == pytest.approx(sum(scored) / 14)
    assert "2 unscored" in reporter.notes[0]
    assert {"raises": "KeyError", "nan": "nan", "inf": "inf"}[how] in reporter.notes[0]
    assert "NaN" not in json.dumps(metrics)


def test_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    parts = parts_with(Fails(2, "raises"))
    run = RunFolder.create(tmp_path / "run", "", {})
    with pytest.raises(RewardError, match=r"8 of 16 completions.*max_unscored = 0.1.*KeyError"):
        train(parts, run, [Notes()], StopSignal())
    assert run.steps() == []
    assert run.checkpoints() == []
