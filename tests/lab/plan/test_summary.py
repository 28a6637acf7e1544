"""The summary of a run, and `covey plan`, which prints it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run
from covey.config import load_config
from covey.config.resolve import resolve
from covey.embedded import CHECKPOINT
from covey.lab.plan.summary import Plan, summarize
from covey.lab.plan.task_facts import TaskFacts
from covey.models import model_path as four_bit
from covey.records.folder import RunFolder


def plan_of(*settings: str, facts: TaskFacts | None = None) -> Plan:
    return summarize(resolve(load_config("arithmetic", settings)), facts)


def test_the_packaged_recipe_in_numbers() -> None:
    plan = plan_of(facts=TaskFacts(held_out=256))
    assert (plan.completions, plan.updates, plan.age) == (128, 4, 3)
    assert (plan.step_tokens, plan.total_tokens) == (128 * 48, 128 * 48 * 100)
    assert (plan.total_updates, plan.evaluations) == (400, 11)
    assert plan.evaluation_tokens == 11 * 256 * 48
    assert (plan.reward_bounds, plan.penalty) == ((0.0, 1.0), "")
    assert json.loads(json.dumps(plan.row()))["step_tokens"] == 6144


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.mini_batches=1"], "takes one optimizer step, from the weights that generated the completions, so every ratio is 1"),
        (["train.mini_batches=2"], "2 optimizer steps; at the last optimizer step the completions are 1 optimizer step old"),
        (["train.epochs=3"], "4 optimizer steps in each of 3 epochs; at the last optimizer step the completions are 11 optimizer steps old"),
        (["filter.dynamic_sampling=true"], "48 tokens, in up to 4 rounds of dynamic sampling."),
        (
            ["objective.beta=0.04", "reference.kind=moving"],
            "KL penalty: 0.04 times the KL to a moving average of the policy (k3), in the loss.",
        ),
        (["evaluate.every=0"], "There are no evaluations."),
        (["evaluate.every=30"], "The policy is evaluated 5 times on the held-out prompts."),
        (["train.stop_after={updates=42}"], "11 training steps."),
        (["train.stop_after={updates=42}"], "In total: 44 optimizer steps"),
        (["train.stop_after={updates=42}", "filter.dynamic_sampling=true"], "At least 11 training steps."),
        (["train.stop_after={tokens=100000}"], "at most 106,143 generated tokens"),
        (["train.stop_after={tokens=5000000}", "train.steps=10"], "At least 814 training steps."),
        (["train.stop_after={tokens=5000000}", "train.steps=10"],
         "In total: at least 3,256 optimizer steps and at most 5,006,143 generated tokens."),
        (["train.stop_after={tokens=5000000}"], "The policy is evaluated at most 11 times"),
        (["train.stop_after={updates=42}"], "The policy is evaluated 11 times"),
        (["train.stop_after={updates=8}"], "The policy is evaluated 3 times"),
    ],
)  # fmt: skip
def test_the_text_follows_the_settings(settings: list[str], words: str) -> None:
    assert words in plan_of(*settings).paragraph()


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(["plan", *words]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ""),
        (
            ["cluster.trainers=6", "cluster.trainer_gpus=1", "cluster.engine_gpus=0.33"],
            "With --ray: 6 trainer ranks, 6 engines, which need 12 CPUs and 8 GPUs.",
        ),
        (
            [
                "cluster.address=local", "cluster.trainer_gpus=1", "cluster.engine_gpus=2",
                "cluster.scoring_actors=3", "scoring.workers=4",
            ],
            "On Ray: 1 engine, 3 scoring workers, which need 13 CPUs and 3 GPUs (1 for the "
            "trainer).",
        ),
    ],
)  # fmt: skip
def test_what_a_run_needs_on_ray(settings: list[str], words: str) -> None:
    assert plan_of(*settings).cluster == words


def test_a_task_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--set", "task.name=jsonl", "--set", "task.train_file=nowhere.jsonl"]) == 2
    assert "cannot start: task: cannot read nowhere.jsonl" in capsys.readouterr().out


def test_a_plan_names_the_missing_package_of_4_bit_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(four_bit, "PACKAGES", ("no_such_package",))
    shown = planned(
        capsys,
        "arithmetic",
        "--set",
        "adapter.rank=8",
        "--set",
        "adapter.load_in_4bit=true",
        code=2,
    )
    assert "cannot start: config: adapter.load_in_4bit needs no_such_package" in shown


def as_data(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    found = json.loads(planned(capsys, *words, "--json", code=code))
    assert isinstance(found, dict)
    return found


def test_the_command_prints_plan_memory_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["train.mini_batches=1", "overlap.max_staleness=2", "evaluate.prompts=50"]
    out = planned(capsys, *[word for setting in settings for word in ("--set", setting)])
    flat = " ".join(out.split())
    places = [
        flat.index(words)
        for words in (
            "100 training steps. Each takes 16 prompts",
            "memory: ",
            "equivalent: with one optimizer step per training step grpo is the same as gspo,",
            "no effect: overlap.max_staleness = 2 drops nothing",
            "may harm: 50 held-out prompts cannot show a difference of 5%",
        )
    ]
    assert places == sorted(places)
    assert "(docs/plan.md#evaluation)" in flat


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_data(capsys, "arithmetic", "--set", "optimizer.learning_rate=0")
    assert list(data) == [
        "text", "plan", "memory", "memory_unknown", "findings", "task_unreadable",
        "cannot_start",
    ]  # fmt: skip
    assert data["plan"]["held_out"] == 256
    assert data["memory"]["peak_bytes"] > 0
    assert [f["kind"] for f in data["findings"]] == ["risk"]
    assert "No findings" in planned(capsys)


def test_no_weights_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    found, whole = as_data(capsys, "arithmetic", "--model", str(folder)), as_data(capsys)
    assert found["memory"]["peak_bytes"] == whole["memory"]["peak_bytes"]
    assert found["findings"] == whole["findings"] == []


def test_a_missing_model_leaves_the_rest_of_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = as_data(capsys, "arithmetic", "--model", str(tmp_path), code=2)
    assert data["memory"] is None
    assert data["memory_unknown"].startswith(
        f"model: {tmp_path} is not a model: it has no config.json"
    )
    assert data["plan"]["held_out"] == 256
    shown = planned(capsys, "arithmetic", "--model", str(tmp_path), code=2)
    assert "memory: unknown, model: " in shown


def test_training_prints_findings_before_the_first_step(
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
    note = "overlap.max_staleness = 2 drops nothing: remove overlap.max_staleness"
    assert "drops nothing" not in "".join(plain)
    assert len(noted) == len(plain) + 1  # equivalent algorithms are not reported
    assert noted.index(note) < next(n for n, line in enumerate(noted) if "step" in line)


def test_a_budget_of_optimizer_steps_ends_with_a_whole_training_step(tmp_path: Path) -> None:
    settings = (
        "train.stop_after={updates=3}", "train.mini_batches=2", "rollout.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_tokens=4", "evaluate.every=0", "model.device=cpu",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    assert run(["train", "--run", str(tmp_path / "run"), *words]) == 0
    last = RunFolder.open(tmp_path / "run").steps()[-1]
    plan = plan_of(*settings)
    assert (last["step"], last["updates"]) == (plan.steps, plan.total_updates) == (2, 4)


def test_the_token_limit_holds_for_a_run_that_drops_every_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No completion of two tokens is correct, so no group has any variance.
    settings = (
        "train.stop_after={updates=1}", "train.mini_batches=1", "filter.dynamic_sampling=true",
        "filter.max_rounds=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=2",
        "evaluate.every=0", "model.device=cpu",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    assert run(["train", "--run", str(tmp_path / "run"), *words]) != 0
    assert "most training steps have no group to train on" in capsys.readouterr().err
    last = RunFolder.open(tmp_path / "run").steps()[-1]
    plan = plan_of(*settings)
    assert (last["step"], last["tokens"]) == (21, 168)
    assert plan.total_tokens == 168


def test_the_age_of_completions_counts_the_steps_that_generation_is_ahead() -> None:
    def text(*settings: str) -> str:
        return summarize(resolve(load_config("arithmetic", [*settings]))).paragraph()

    assert "every ratio is 1" in text("train.mini_batches=1")
    stale = text("train.mini_batches=1", "overlap.staleness=2")
    assert (
        "one optimizer step; at the last optimizer step the completions are up to 2 optimizer steps old"
        in (stale)
    )
    assert "up to 11 optimizer steps old" in text("train.mini_batches=4", "overlap.staleness=2")
