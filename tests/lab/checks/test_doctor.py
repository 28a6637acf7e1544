"""The doctor passes a healthy configuration, and names each of six faults that are built in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey import step
from covey.cli.main import run as covey
from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.engines.native.engine import NativeEngine
from covey.lab.checks import doctor
from covey.lab.checks.doctor import examine_run, resume_checks, reward_checks, sandbox_check, small
from covey.lab.checks.numerics import upcast
from covey.lab.checks.policy import engine_checks, gradient_checks, weights_check
from covey.lab.checks.result import Clock, Result
from covey.lab.plan.memory import forecast
from covey.policy.optimizer import MasterAdamW
from covey.records.trackers import Tracker
from covey.rollout import episode
from covey.rollout.collect import collect_step
from covey.run import Run
from covey.sandbox import program
from covey.types import Group

QUICK = ("model.device=cpu", "rollout.prompts_per_step=2", "rollout.group_size=4",
         "rollout.max_tokens=24", "evaluate.prompts=4")  # fmt: skip


def config_of(*settings: str) -> Config:
    return small(resolve(load_config("arithmetic", [*QUICK, *settings])))


@pytest.fixture
def parts() -> Iterator[Run]:
    with closing(Run.build(config_of())) as made:
        yield made


def groups_of(parts: Run) -> Sequence[Group]:
    return collect_step(parts, 1, Tracker(), 0.0).collected.groups


def failed(results: Iterator[Result]) -> list[str]:
    return [result.name for result in results if result.passed is False]


def test_a_healthy_configuration_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    words = [word for setting in QUICK for word in ("--set", setting)]
    covey(["doctor", "--json", "--out", str(out), *words])
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(out.read_text())
    # Other tests of this process have used memory, and others its cores.
    wrong = {c["name"] for c in data["checks"] if c["passed"] is False} - {"memory", "time"}
    assert wrong == set(), data
    assert [c["name"] for c in data["checks"]] == [
        "engine: log-probs", "engine: greedy text", "gradient: micro-batches", "gradient: padding",
        "gradient: packing", "gradient: ranks", "gradient: order", "engine: new weights",
        "reward: determinism", "reward: lab", "sandbox", "resume", "memory", "time", "versions",
    ]  # fmt: skip


def test_a_wrong_denominator(parts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over the rows of a micro-batch, where the mean is over the optimizer step."""
    groups, own = groups_of(parts), step.policy_loss

    def mean(objective: Any, micro: Any, *rest: Any) -> Any:
        output = own(objective, micro, *rest)
        return output._replace(loss=output.loss / len(micro))

    assert failed(gradient_checks(parts, groups, Clock())) == []
    monkeypatch.setattr(step, "policy_loss", mean)
    assert "gradient: micro-batches" in failed(gradient_checks(parts, groups, Clock()))


def test_shifted_log_probs(parts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = episode.SingleTurnEpisodes.done

    def shifted(source: Any, completions: Any) -> None:
        own(source, [replace(c, logp=(*c.logp[1:], c.logp[0])) for c in completions])

    monkeypatch.setattr(episode.SingleTurnEpisodes, "done", shifted)
    assert failed(engine_checks(parts, groups_of(parts), Clock())) == ["engine: log-probs"]


def test_stale_weights(parts: Run) -> None:
    """An engine with a copy of the weights that new ones never reach."""
    stale = replace(parts, engine=NativeEngine(upcast(parts.policy.model)))
    groups = groups_of(stale)
    assert failed(engine_checks(stale, groups, Clock())) == []
    assert failed(weights_check(stale, groups, Clock())) == ["engine: new weights"]


def test_a_reward_that_depends_on_chance() -> None:
    config = config_of("reward.name=tests.lab.doctor_faults:by_chance")
    assert "reward: determinism" in failed(reward_checks(config))


def test_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    code = config_of("task.name=code", "reward.name=code_tests")
    monkeypatch.setattr(program, "isolation_problem", lambda: "bwrap is not installed")
    assert failed(sandbox_check(code)) == ["sandbox"]
    assert failed(sandbox_check(config_of())) == []  # sums are not programs
    unsafe = config_of("task.name=code", "reward.name=code_tests", "reward.unsafe=true")
    assert failed(sandbox_check(unsafe)) == ["sandbox"]


def test_a_broken_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of AdamW are not restored."""
    own = MasterAdamW.load

    def forgets(optimizer: Any, weights: Any, moments: Any) -> None:
        own(optimizer, weights, {name: value * 0 for name, value in moments.items()})

    monkeypatch.setattr(MasterAdamW, "load", forgets)
    assert "resume" in failed(resume_checks(config_of(), tmp_path, forecast(config_of()), Clock()))


def test_a_checkup_without_time_says_what_it_skips() -> None:
    """No model is loaded; the checks that need no training still run."""
    said: list[str] = []
    found = list(examine_run(config_of(), Clock(limit=0.0, say=said.append)))
    assert [(r.name, r.passed) for r in found if r.figure.startswith("skipped: would take")] == [
        ("engine, gradient", None),
        ("resume, memory, time", None),
    ]
    assert "loading the model" not in said
    sandbox = set() if program.isolation_problem() else {"sandbox"}
    assert {"reward: determinism", *sandbox} <= {r.name for r in found if r.passed}


def test_slow_gradients_are_skipped_one_by_one(parts: Run) -> None:
    """The first gradient is measured; the others are as slow, so the time is not enough."""
    said: list[str] = []

    def spend(text: str) -> None:
        said.append(text)
        clock.limit = 0.0

    clock = Clock(limit=3600.0, say=spend)
    found = list(gradient_checks(parts, groups_of(parts), clock))
    assert [r.passed for r in found] == [None] * 5
    assert all("skipped: would take" in r.figure for r in found)
    assert said == ["gradient"]


def test_progress_names_every_slow_check(tmp_path: Path, parts: Run) -> None:
    said: list[str] = []
    clock = Clock(say=said.append)
    groups = groups_of(parts)
    made = [*engine_checks(parts, groups, clock), *gradient_checks(parts, groups, clock)]
    names = [text.split(", about")[0] for text in said]
    assert [result.name for result in made] == [name for name in names if name != "gradient"]


@pytest.mark.parametrize(
    ("kind", "used", "passed"),
    [("cuda", 147, True), ("cuda", 400, False), ("cpu", 147, False)],
)
def test_workspaces_of_a_gpu_count_as_memory_of_a_tiny_model(
    kind: str, used: int, passed: bool
) -> None:
    """The embedded model needs 22 MiB for tensors, and torch took 147 MiB of an H200 for it."""
    expected = SimpleNamespace(
        device=SimpleNamespace(kind=kind), tensors=22 * 2**20, peak=22 * 2**20
    )
    assert doctor._memory(cast(Any, expected), used * 2**20).passed is passed
