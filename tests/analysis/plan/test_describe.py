"""A run in words and numbers, and `covey plan`, which says them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.analysis.plan.describe import Plan, describe
from covey.analysis.plan.finding import Seen
from covey.cli.main import run
from covey.config import load_config
from covey.embedded import CHECKPOINT
from covey.run.folder import RunFolder
from covey.training.build import resolve


def plan_of(*settings: str, seen: Seen | None = None) -> Plan:
    return describe(resolve(load_config("arithmetic", settings)), seen)


def test_the_packaged_recipe_in_numbers() -> None:
    plan = plan_of(seen=Seen(held_out=256))
    assert (plan.answers, plan.updates, plan.age) == (128, 4, 3)
    assert (plan.step_tokens, plan.total_tokens) == (128 * 48, 128 * 48 * 100)
    assert (plan.total_updates, plan.evaluations) == (400, 11)
    assert plan.evaluation_tokens == 11 * 256 * 48
    assert (plan.reward_bounds, plan.reference) == ((0.0, 1.0), "")
    assert json.loads(json.dumps(plan.row()))["step_tokens"] == 6144
    assert dict(plan.table())["answers a step"] == "16 x 8 = 128"


def test_the_packaged_recipe_in_words() -> None:
    assert plan_of(seen=Seen(held_out=256)).paragraph() == (
        "Each of 100 steps asks 16 prompts and samples 8 answers to each: 128 answers of at most 48 "
        "tokens. grpo learns from them in 4 updates; at the last one the answers are 3 updates old. "
        "In all that is 400 updates and at most 614,400 sampled tokens. The reward think_answer is "
        "between 0 and 1. It counts: `correct` for a right answer in the right form, plus `format` "
        "for the form alone. There is no penalty, and so no reference. It is measured 11 times on "
        "256 held-out prompts."
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.mini_batches=1"], "in one update, with the weights that sampled them: every ratio is 1"),
        (["train.mini_batches=2"], "in 2 updates; at the last one the answers are 1 update old"),
        (["train.epochs=3"], "in 4 updates in each of 3 passes; at the last one the answers are 11 updates old"),
        (["filter.dynamic_sampling=true"], "48 tokens, and up to 4 times as many to replace groups."),
        (
            ["objective.beta=0.04", "reference.kind=moving"],
            "A penalty of 0.04 times the KL to weights that follow the policy (k3) is in the loss.",
        ),
        (["evaluate.every=0"], "Nothing is measured on the way."),
        (["evaluate.every=30"], "It is measured 5 times on the held-out prompts."),
        (["train.stop_after={updates=42}"], "Each of 11 steps"),
        (["train.stop_after={updates=42}"], "In all that is 44 updates"),
        (["train.stop_after={updates=42}", "filter.dynamic_sampling=true"], "Each of at least 11 steps"),
        (["train.stop_after={tokens=100000}"], "at most 106,143 sampled tokens"),
        (["train.stop_after={tokens=5000000}", "train.steps=10"], "Each of at least 814 steps"),
        (["train.stop_after={tokens=5000000}", "train.steps=10"],
         "In all that is at least 3,256 updates and at most 5,006,143 sampled tokens."),
        (["train.stop_after={tokens=5000000}"], "It is measured at most 11 times"),
        (["train.stop_after={updates=42}"], "It is measured 11 times"),
        (["train.stop_after={updates=8}"], "It is measured 3 times"),
    ],
)  # fmt: skip
def test_what_is_said_follows_the_settings(settings: list[str], words: str) -> None:
    assert words in plan_of(*settings).paragraph()


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def as_data(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found = json.loads(planned(capsys, *words, "--json"))
    assert isinstance(found, dict)
    return found


def test_the_command_says_it_all_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["train.mini_batches=1", "overlap.max_staleness=2", "evaluate.prompts=50"]
    out = planned(capsys, *[word for setting in settings for word in ("--set", setting)])
    flat = " ".join(out.split())
    places = [
        flat.index(words)
        for words in (
            "Each of 100 steps asks 16 prompts",
            "answers a step 16 x 8 = 128",
            "memory: ",
            "the same: with one update per rollout grpo is the same as gspo,",
            "does nothing: overlap.max_staleness = 2 drops nothing",
            "may harm: 50 held-out prompts cannot show a difference of 5%",
        )
    ]
    assert places == sorted(places)
    assert "(docs/plan.md#evaluation)" in flat


def test_the_same_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_data(capsys, "arithmetic", "--set", "optimizer.learning_rate=0")
    assert list(data) == ["text", "plan", "memory", "memory_unknown", "findings"]
    assert data["plan"]["held_out"] == 256
    assert data["memory"]["peak_bytes"] > 0
    assert [f["kind"] for f in data["findings"]] == ["risk"]
    assert "Nothing stands out" in planned(capsys)


def test_no_weights_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    found, whole = as_data(capsys, "--model", str(folder)), as_data(capsys)
    assert found["memory"]["peak_bytes"] == whole["memory"]["peak_bytes"]
    assert found["findings"] == whole["findings"] == []


def test_a_model_that_is_not_there_leaves_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = as_data(capsys, "--model", str(tmp_path))
    assert data["memory"] is None
    assert data["memory_unknown"].startswith(f"model: {tmp_path} is a folder without config.json")
    assert data["plan"]["held_out"] == 256
    assert "memory: not known, model: " in planned(capsys, "--model", str(tmp_path))


def test_training_says_what_does_nothing_before_it_begins_and_else_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quick = [
        "train.steps=1",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "evaluate.every=0",
    ]

    def lines(name: str, *settings: str) -> list[str]:
        words = [word for setting in (*quick, *settings) for word in ("--set", setting)]
        assert run(["train", "--run", str(tmp_path / name), *words]) == 0
        return capsys.readouterr().out.splitlines()

    plain = lines("plain")
    noted = lines("noted", "overlap.max_staleness=2", "train.mini_batches=1")
    note = "overlap.max_staleness = 2 drops nothing: leave it out"
    assert "drops nothing" not in "".join(plain)
    assert len(noted) == len(plain) + 1  # nothing of what is merely the same
    assert noted.index(note) < next(n for n, line in enumerate(noted) if "step" in line)


def test_a_budget_of_updates_ends_with_a_whole_step(tmp_path: Path) -> None:
    settings = (
        "train.stop_after={updates=3}", "train.mini_batches=2", "rollout.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_tokens=4", "evaluate.every=0", "model.device=cpu",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    assert run(["train", "--run", str(tmp_path / "run"), *words]) == 0
    last = RunFolder.open(tmp_path / "run").steps()[-1]
    told = plan_of(*settings)
    assert (last["step"], last["updates"]) == (told.steps, told.total_updates) == (2, 4)


def test_tokens_are_at_most_those_of_a_run_that_finds_nothing_to_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No answer of two tokens is right, so no group is mixed.
    settings = (
        "train.stop_after={updates=1}", "train.mini_batches=1", "filter.dynamic_sampling=true",
        "filter.max_rounds=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=2",
        "evaluate.every=0", "model.device=cpu",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    assert run(["train", "--run", str(tmp_path / "run"), *words]) != 0
    assert "most steps have nothing to learn from" in capsys.readouterr().err
    last = RunFolder.open(tmp_path / "run").steps()[-1]
    told = plan_of(*settings)
    assert (last["step"], last["tokens"]) == (21, 168)
    assert told.total_tokens == 168
