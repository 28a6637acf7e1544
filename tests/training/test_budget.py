"""How long a run is: training steps, or a budget of tokens or optimizer steps."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.schema import StopAfter, Train
from covey.errors import ConfigError, RunError
from covey.policy.schedule import PATIENCE, Budget, Used, schedule_of


def used(steps: int = 0, tokens: int = 0, updates: int = 0) -> Used:
    return Used(steps=steps, tokens=tokens, updates=updates)


def budget(**settings: Any) -> Budget:
    return Budget(settings=Train(**settings))


@given(steps=st.integers(1, 300), every=st.integers(1, 50), step=st.integers(1, 300))
def test_a_budget_of_steps_counts_steps(steps: int, every: int, step: int) -> None:
    given_steps = budget(steps=steps)
    before, after = used(step - 1, 17 * step, 3), used(step, 40 * step, 3)
    assert given_steps.passed(every, before, after) == (step % every == 0)
    assert given_steps.over(after) == (step >= steps)
    assert given_steps.spent(before) == (step - 1) / steps


def test_a_budget_of_tokens_ends_at_the_first_step_that_reaches_it() -> None:
    tokens = budget(steps=10, stop_after=StopAfter(tokens=1000))
    assert not tokens.over(used(steps=50, tokens=999))
    assert tokens.over(used(steps=2, tokens=1000))
    # Evaluations come when another 2 of 10 steps' worth is spent: 200 tokens.
    points = [0, 150, 199, 200, 380, 420, 900, 1100]
    pairs = itertools.pairwise(points)
    passed = [tokens.passed(2, used(tokens=a), used(tokens=b)) for a, b in pairs]
    assert passed == [False, False, True, False, True, True, True]


def test_a_budget_of_optimizer_steps_fails_when_there_is_nothing_to_learn() -> None:
    updates = budget(stop_after=StopAfter(updates=10), mini_batches=4)  # three steps' worth
    assert updates.over(used(steps=3, updates=12))
    assert not updates.over(used(steps=3 * PATIENCE, updates=9))
    assert updates.over(used(steps=3 * PATIENCE + 1, updates=12))
    with pytest.raises(RunError, match=r"only 9 of 10 optimizer steps"):
        updates.over(used(steps=3 * PATIENCE + 1, updates=9))


def test_the_learning_rate_follows_the_tokens_that_are_spent() -> None:
    def rate_at(version: int, *settings: str) -> float:
        linear = [
            "optimizer.schedule=linear",
            "optimizer.learning_rate=1",
            "optimizer.warmup_steps=0",
        ]
        config = load_config(None, [*linear, "train.steps=10", "train.mini_batches=2", *settings])
        return schedule_of(config)(version, used(steps=40, tokens=500, updates=80))

    tokens = "train.stop_after={tokens=1000}"  # nominally 20 optimizer steps
    # Half of the tokens are spent, so the rate is half of its peak, whatever the version is ...
    assert math.isclose(rate_at(80, tokens), 0.5)
    # ... and the second optimizer step of the batch comes after the first.
    assert math.isclose(rate_at(81, tokens), 0.45)
    # A run that counts steps has its place in the version itself.
    assert math.isclose(rate_at(5), 0.75)
    assert Train(stop_after=StopAfter(updates=7), steps=100).total_optimizer_steps == 7


def test_a_run_stops_after_one_thing() -> None:
    with pytest.raises(
        ConfigError, match=r"stop_after takes only one of steps, tokens, updates and epochs"
    ):
        load_config(None, ["train.stop_after={tokens=3, updates=4}"])
    assert load_config(None, ["train.stop_after={steps=3}"]).train.steps == 3


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_spends_its_tokens_and_evaluates_in_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "model.device=cpu", "train.stop_after={tokens=1500}", "train.steps=4",
        "evaluate.every=2", "evaluate.prompts=4", "rollout.prompts_per_step=4", "rollout.group_size=4",
        "train.mini_batches=1",
    )  # fmt: skip
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert covey(["train", "--run", str(tmp_path / "run"), *overrides]) == 0
    assert "resume with" not in capsys.readouterr().out  # it is finished, though not at step 4
    steps = rows(tmp_path / "run/steps.jsonl")
    tokens = [0, *(row["tokens"] for row in steps)]
    assert tokens[-2] < 1500 <= tokens[-1]
    assert [row["updates"] for row in steps] == list(range(1, len(steps) + 1))
    lengths = [16 * row["val/sequence_lengths"] for row in steps]
    assert tokens[1:] == pytest.approx([sum(lengths[: n + 1]) for n in range(len(lengths))])
    # The linear schedule stands where the tokens before the step say.
    rates = [1e-4 * (1 - spent / 1500) for spent in tokens[:-1]]
    assert [row["lr"] for row in steps] == pytest.approx(rates)
    halfway = next(n for n, spent in enumerate(tokens) if spent >= 750)
    assert [row["step"] for row in rows(tmp_path / "run/eval.jsonl")] == [0, halfway, len(steps)]
    items = rows(tmp_path / f"run/evaluations/{halfway:06d}.jsonl")
    assert len(items) == 4
    assert all(item["success"] in (True, False) for item in items)
