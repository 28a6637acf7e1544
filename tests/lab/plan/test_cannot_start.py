"""`covey plan` refuses what `covey train` refuses before it loads a model, with the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.config import check as start_checks
from covey.config import load_config
from covey.config.resolve import resolve
from covey.models import model_path as four_bit
from covey.run import Run

RAY = ("cluster.address=local", "cluster.trainers=2")
REFUSED: dict[str, tuple[str, ...]] = {
    "overlap.mode": (*RAY, "overlap.staleness=1", "overlap.mode=copy", "engine.kind=process"),
    "parallel.shard_ranks": (
        "cluster.address=local", "cluster.trainers=3", "parallel.strategy=fsdp",
        "parallel.shard_ranks=2",
    ),
    "model.device": (*RAY, "model.device=cuda:1"),
    "engine.dtype": ("engine.dtype=float8", "model.device=cpu"),
    "engine.kv_dtype": ("engine.kv_dtype=float8", "model.device=cpu"),
    "the device 'cuda": ("model.device=cuda",),
    "reward.name": ("reward.name=functions",),
    "task.name": ("task.name=dataset",),
    "environment.name": ("environment.name=passed",),
    "trackers": ("trackers=['nothing']",),
    "adapter.dropout": ("adapter.dropout=0.1",),
    "adapter.also_train": ("adapter.also_train=['lm_head']",),
    "needs vLLM": ("engine.kind=vllm",),
    "no_such_package": ("adapter.rank=4", "adapter.load_in_4bit=true"),
    "reference.kind = 'adapter_off'": ("objective.beta=0.1", "reference.kind=adapter_off"),
    "reference.kind = 'moving'": (
        "objective.beta=0.1", "reference.kind=moving", "adapter.rank=4",
    ),
    "cluster.reference_actor": (
        "cluster.address=local", "cluster.reference_actor=true", "objective.beta=0.1",
        "reference.kind=offloaded",
    ),
    "environment.max_tokens": (
        "environment.name=calculator", "reward.name=environment", "environment.max_tokens=48",
        "rollout.max_tokens=48",
    ),
    "rollout.long_prompts": (
        "environment.name=calculator", "reward.name=environment", "rollout.long_prompts=truncate",
    ),
    "environment.parallel_calls": (
        "environment.name=calculator", "reward.name=environment",
        "environment.call_format=mistral", "environment.parallel_calls=false",
    ),
    "environment: max_rounds": ("environment.name=code_repair", "environment.max_rounds=0"),
    "engine.kind": ("overlap.mode=copy", "overlap.staleness=1"),
    "nowhere.jsonl": ("task.name=jsonl", "task.train_file=nowhere.jsonl"),
    "pairs.jsonl": ("objective.name=dpo", "preferences.file=pairs.jsonl"),
    "different prompts": ("task.name=jsonl", "task.train_file=two.jsonl"),
    "held-out prompts": (
        "task.name=jsonl", "task.train_file=two.jsonl", "task.held_out_share=0.0",
    ),
    "there is no folder 'nowhere'": ("model.path=nowhere/a/b",),
    "rollout.max_tokens": ("rollout.max_tokens=100000",),
}  # fmt: skip


def words(settings: tuple[str, ...]) -> list[str]:
    return ["arithmetic", *(word for setting in settings for word in ("--set", setting))]


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_refuses_what_a_run_refuses(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(four_bit, "PACKAGES", ("no_such_package",))
    rows = [{"prompt": f"1 + {n}", "target": f"{n + 1}"} for n in range(4)]
    Path("two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = words(REFUSED[name])
    assert run(["train", *arguments, "--run", "made"]) != 0
    refused = capsys.readouterr().err.splitlines()[-1].removeprefix("covey: ")
    assert name in refused
    assert not Path("made").exists()
    assert run(["plan", *arguments]) == 2
    planned = capsys.readouterr()
    assert "No findings" not in planned.out
    stopping = [line.removeprefix("cannot start: ") for line in planned.out.splitlines()]
    assert refused in [
        *stopping,
        *(line.removeprefix("covey: ") for line in planned.err.splitlines()),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("overlap.staleness=1",),
        ("evaluate.every=0",),
        ("adapter.rank=4",),
        ("environment.name=calculator", "reward.name=environment", "environment.call_format=tags"),
    ],
)
def test_a_plan_of_a_run_that_starts_ends_with_0(
    settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *words(settings)]) == 0
    assert "cannot start" not in capsys.readouterr().out


def test_the_data_of_a_plan_says_what_stops_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    overlap = (*RAY, "overlap.staleness=1", "overlap.mode=copy", "engine.kind=process")
    assert run(["plan", *words((*overlap, "adapter.dropout=0.1")), "--json"]) == 2
    stopping = json.loads(capsys.readouterr().out)["cannot_start"]
    assert [any(name in why for why in stopping) for name in ("overlap.mode", "adapter.dropout")]


def test_a_plan_for_another_gpu_does_not_ask_for_this_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    float8 = words(("engine.dtype=float8", "model.device=cuda"))
    assert run(["plan", *float8, "--gpu", "80"]) == 0
    assert "cannot start" not in capsys.readouterr().out


def test_ranks_of_a_plan_are_the_ranks_of_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    several = words(("overlap.staleness=1", "overlap.mode=copy", "engine.kind=process"))
    assert run(["plan", *several]) == 0
    assert run(["plan", *several, "--ranks", "2"]) == 2
    assert "overlap.mode" in capsys.readouterr().out


def test_a_start_and_a_plan_make_the_same_checks() -> None:
    """The start calls the one list of checks that a plan shows."""
    config = resolve(load_config("arithmetic", ["adapter.dropout=0.1"]))
    (why,) = start_checks.obstacles(config, 1)
    with pytest.raises(Exception, match=r"adapter\.dropout") as raised:
        Run.build(config)
    assert str(raised.value) == why
