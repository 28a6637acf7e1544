"""Counts of other benchmarks: the arithmetic of a step, and completions that are all new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.embedded import CHECKPOINT
from covey.rewards import Score
from covey.types import Prompt
from tests.processes import FORKS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_floor_reads_a_prompt_once_for_its_group_in_training_too() -> None:
    from step_vs_trl import floor_gflop

    shape = json.loads((CHECKPOINT / "config.json").read_text())
    found = floor_gflop(25.0)
    # Layers see the same tokens, forward and twice that backward. The head is for 128 x 25 tokens,
    # and while sampling for 16 prompts and 128 x 24 tokens.
    head = 2 * shape["hidden_size"] * shape["vocab_size"] * (128 - 16) / 1e9
    assert found["training"] == pytest.approx(3 * (found["sampling"] + head))


class Recorded:
    """A reward that writes down what it has scored."""

    quick, version, bounds = False, 1, (0.0, 1.0)
    file = Path()

    def __call__(self, prompt: Prompt, text: str) -> Score:
        with self.file.open("a") as file:
            file.write(json.dumps([prompt.target, text]) + "\n")
        return Score(reward=1.0, success=True)


def test_no_completion_is_scored_twice(tmp_path: Path) -> None:
    import rewards

    kinds = (rewards.numbers, rewards.formulas, rewards.equations, rewards.intervals)
    for make in (*kinds, rewards.programs):
        reward = Recorded()
        reward.file = tmp_path / make.__name__
        found = rewards.rate(reward, make, 104, workers=2)
        lines = reward.file.read_text().splitlines()
        assert found["completions"] == found["correct"] == 104
        assert len(set(lines)) == len(lines) > 104


def test_a_step_of_an_algorithm_is_found_to_be_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import every_algorithm

    monkeypatch.setattr(every_algorithm, "subprocess", FORKS)
    found = every_algorithm.train("grpo", tmp_path, steps=1, seed=0, more=["evaluate.prompts=16"])
    assert found["finite"]
    assert found["skipped_updates"] == 0
    assert found["low"] <= found["after"] <= found["high"]
