"""Rollouts ahead of training: which weights generate what, and that runs repeat and resume."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import load_config
from covey.config.resolve import objective_of, resolve
from covey.engines.native.engine import NativeCopy
from covey.engines.protocol import RequestSource, WeightSource
from covey.errors import ConfigError, RunError
from covey.loop import train
from covey.policy.policy import load_model
from covey.records.folder import RunFolder
from covey.records.resume import start_of
from covey.records.trackers import Tracker
from covey.rollout.queue import FILE, read_in_flight, write_in_flight
from covey.run import Run
from covey.stopping import StopSignal
from tests.trackers import Notes

STEPS = 5
QUICK = [
    f"train.steps={STEPS}", "rollout.prompts_per_step=3", "rollout.group_size=4",
    "rollout.max_tokens=14", "evaluate.every=3", "evaluate.prompts=4", "save.every=1",
    "save.keep=9", "optimizer.learning_rate=1e-3", "task.min_operations=1", "task.max_operations=2",
    "task.train_size=90", "train.mini_batches=1",
]  # fmt: skip
ALGORITHMS = ["grpo", "dapo", "gspo", "rloo", "cispo"]
CASES = {
    **{name: [f"objective.name={name}"] for name in ALGORITHMS},
    "lora": ["adapter.rank=2", "objective.name=dr_grpo"],
    "dynamic": ["filter.dynamic_sampling=true", "filter.max_rounds=3", "objective.name=dapo"],
}


class Unsteady(NativeCopy):
    """An engine that is slow at random."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        time.sleep(random.random() / 50)
        NativeCopy.load_weights(self, weights, version)

    def run(self, requests: RequestSource) -> None:
        time.sleep(random.random() / 20)
        NativeCopy.run(self, requests)


def parts_of(*overrides: str, mode: str = "ahead") -> Run:
    """Return the parts of a run; in mode "copy" with an engine in this process."""
    parts = Run.build(resolve(load_config("arithmetic", [*QUICK, *overrides])))
    if mode == "ahead":
        return parts
    overlap = parts.config.overlap.model_copy(update={"mode": mode})
    config = parts.config.model_copy(update={"overlap": overlap})
    return replace(parts, config=config, engine=Unsteady(load_model(config)))


def trained(parts: Run, path: Path, *trackers: Tracker) -> RunFolder:
    folder = RunFolder.create(path, "", {})
    train(parts, folder, trackers, StopSignal())
    return folder


def bits(parts: Run, folder: RunFolder) -> Mapping[str, Any]:
    """Return all numbers that must be the same."""
    rollouts = [
        [[row[k] for k in ("prompt_id", "tokens", "sampler_logp", "reward", "advantage")] for row in
         folder.rollouts(step)]
        for step, _ in folder.numbered("rollouts", ".jsonl")
    ]  # fmt: skip
    weights = {name: weight.clone() for name, weight in parts.policy.weights()}
    return {"rollouts": rollouts, "weights": weights, "evaluations": folder.evaluations()}


def assert_same(one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    assert one["rollouts"] == two["rollouts"]
    assert one["evaluations"] == two["evaluations"]
    assert all(torch.equal(weight, two["weights"][name]) for name, weight in one["weights"].items())


@pytest.mark.parametrize("case", CASES)
def test_a_copy_without_staleness_is_the_synchronous_run(case: str, tmp_path: Path) -> None:
    settings = [*CASES[case], "train.steps=3"]
    plain, copied = parts_of(*settings), parts_of(*settings, mode="copy")
    expected = bits(plain, trained(plain, tmp_path / "plain"))
    assert_same(expected, bits(copied, trained(copied, tmp_path / "copied")))


@pytest.mark.parametrize("mode", ["ahead", "copy"])
def test_a_stale_run_repeats_and_resumes(mode: str, tmp_path: Path) -> None:
    settings = ["overlap.staleness=2"]
    notes = Notes()
    one = parts_of(*settings, mode=mode)
    folder = trained(one, tmp_path / "one", notes)
    expected = bits(one, folder)
    assert any("objective.correction = 'token_truncate'" in note for note in notes.notes)

    # Step s is generated with the weights of a step that its number alone decides.
    before = {"ahead": [0, 0, 0, 3, 3], "copy": [0, 0, 0, 1, 2]}[mode]
    found = [
        {row["policy_version"] for row in folder.rollouts(step)} for step in range(1, STEPS + 1)
    ]
    assert found == [{version} for version in before]
    steps = folder.steps()
    ages = [n - version for n, version in enumerate(before)]
    assert [row["overlap/staleness_max"] for row in steps] == ages
    assert [row["overlap/staleness"] for row in steps] == ages
    assert ("time/wait_rollouts" in steps[0]) == ("time/wait_training" in steps[0])
    assert ("time/wait_rollouts" in steps[0]) == (mode == "copy")

    # A ratio of exactly 1 would correct nothing.
    assert steps[0]["policy/correction_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(steps[2]["policy/correction_mean"] - 1.0) > 1e-4

    again = parts_of(*settings, mode=mode)
    assert_same(expected, bits(again, trained(again, tmp_path / "again")))
    for step in (1, 3):
        resumed = parts_of(*settings, mode=mode)
        train(resumed, folder, [], StopSignal(), start_of(folder, step))
        assert_same(expected, bits(resumed, folder))


def test_a_checkpoint_holds_what_is_in_flight(tmp_path: Path) -> None:
    parts = parts_of("overlap.staleness=2", "evaluate.every=0", *CASES["dynamic"])
    folder = trained(parts, tmp_path / "run")
    read = partial(read_in_flight, prompts=parts.prompts, seed=parts.config.seed, count=3)
    for step, ahead in ((1, [2, 3]), (2, [3]), (3, []), (4, [5]), (5, [])):
        held = read(folder.path / f"checkpoints/{step:06d}")
        assert [one.ticket.step for one in held] == ahead
        for one in held:
            rows = folder.rollouts(one.ticket.step)
            assert [list(r.tokens) for r in one.collected.rollouts] == [r["tokens"] for r in rows]
            logps = [list(r.sampler_logp) for r in one.collected.rollouts]
            assert logps == [row["sampler_logp"] for row in rows]
            write_in_flight(tmp_path, [one])
            assert read(tmp_path) == [one]
            # The groups to train on are those that were collected, not equal ones.
            assert all(any(g is c for c in one.collected.groups) for g in one.selected.groups)
    assert max(row["rollout/rounds"] for row in folder.steps()) > 1
    with pytest.raises(
        RunError, match=r"no prompt 'arithmetic/.*', so the data or the seed have changed"
    ):
        read_in_flight(tmp_path, parts.prompts[:9], seed=1, count=3)
    (tmp_path / FILE).write_text(json.dumps({"ticket": [1, 2]}))
    with pytest.raises(RunError, match=r"cannot be read, because in_flight.jsonl"):
        read(tmp_path)


def test_an_error_in_the_background_reaches_the_loop(tmp_path: Path) -> None:
    class Broken(NativeCopy):
        def run(self, requests: RequestSource) -> None:
            raise RunError("the engine is broken")

    parts = parts_of("overlap.staleness=1", "evaluate.every=0", mode="copy")
    with pytest.raises(RunError, match="the engine is broken"):
        trained(replace(parts, engine=Broken(parts.policy.model)), tmp_path / "run")


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_failure_in_the_background_keeps_the_progress(save_every: int, tmp_path: Path) -> None:
    class Breaks(Unsteady):
        calls = 0

        def run(self, requests: RequestSource) -> None:
            Breaks.calls += 1
            if Breaks.calls == 4:
                raise RunError("the engine is broken")
            super().run(requests)

    settings = ["overlap.staleness=2", "evaluate.every=0", f"save.every={save_every}"]
    parts = parts_of(*settings, mode="copy")
    path = tmp_path / "run"
    with pytest.raises(RunError, match="the engine is broken"):
        trained(replace(parts, engine=Breaks(load_model(parts.config))), path)
    folder = RunFolder(path)
    step, checkpoint = folder.checkpoints()[-1]
    assert step == 3  # the rollouts of step 4 failed
    assert not (checkpoint / FILE).exists()
    resumed = parts_of(*settings, mode="copy")
    train(resumed, folder, [], StopSignal())
    assert [row["step"] for row in folder.steps()] == list(range(1, STEPS + 1))


def test_groups_that_are_too_old_for_the_policy_are_dropped(tmp_path: Path) -> None:
    notes = Notes()
    settings = ["overlap.staleness=2", "overlap.max_staleness=1", "evaluate.every=0"]
    folder = trained(parts_of(*settings), tmp_path / "run", notes)
    rows = folder.steps()
    # The weights do not change in step 3, so step 5 is one optimizer step behind again.
    assert [row["overlap/staleness_max"] for row in rows] == [0, 1, 2, 0, 1]
    assert [row["rollout/dropped_stale"] for row in rows] == [0, 0, 3, 0, 0]
    assert [row["rollout/trained_groups"] for row in rows] == [3, 3, 0, 3, 3]
    assert [row["updates"] for row in rows] == [1, 2, 2, 3, 4]
    (note,) = [note for note in notes.notes if "no group" in note]
    assert note.startswith("step 3: no group to train on: all groups were sampled more than")


def test_an_engine_that_cannot_load_in_flight(tmp_path: Path) -> None:
    parts = parts_of("overlap.staleness=2", "evaluate.every=0", mode="copy")
    overlap = parts.config.overlap.model_copy(update={"in_flight": True})
    config = parts.config.model_copy(update={"overlap": overlap})
    with pytest.raises(ConfigError, match="cannot load weights while it generates"):
        trained(replace(parts, config=config), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["overlap.mode=copy"], "set engine.kind = 'process'"),
        (["overlap.in_flight=true"], "needs overlap.mode = 'copy'"),
        (["overlap.staleness=1", "objective.correction=none", "train.old_logp=recompute"],
         "generates with older weights"),
        (["overlap.staleness=1", "objective.correction=none", "rollout.top_p=0.9"],
         "generates with older weights"),
        (["overlap.staleness=65"], "less than or equal to 64"),
        (["engine.device=cpu"], "needs engine.kind = 'process'"),
    ],
)  # fmt: skip
def test_settings_that_need_others(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_config("arithmetic", settings))


def test_which_correction_is_on_by_default() -> None:
    def options(*settings: str) -> dict[str, Any]:
        return resolve(load_config("arithmetic", [*settings])).objective.options

    assert options()["correction"] == "none"
    assert options("overlap.staleness=1")["correction"] == "token_truncate"
    given = options("overlap.staleness=1", "objective.correction=token_mask")
    assert given["correction"] == "token_mask"
    assert options("overlap.staleness=1", "train.old_logp=sampler")["correction"] == "none"


@pytest.mark.parametrize(
    "off_policy", ["overlap.staleness=1", "replay.groups=2", "engine.dtype=float8"]
)
@pytest.mark.parametrize("name", ["decoupled_ppo", "scalerl", "bapo", "m2po", "dppo"])
def test_an_algorithm_with_a_correction_keeps_it(name: str, off_policy: str) -> None:
    resolved = resolve(load_config("arithmetic", [f"objective.name={name}", off_policy]))
    assert resolved.objective.options["correction"] == "none"
    objective = objective_of(resolved)
    log_rho = torch.tensor([[0.0, 1.0, 1.7]])  # the factors are 1, 2.72 and 5.47
    if name == "decoupled_ppo":
        assert objective.correction is not None
        factors = objective.correction(log_rho, log_rho > -1)
        torch.testing.assert_close(factors, torch.tensor([[1.0, math.e, 0.0]]))
    else:
        assert objective.correction is None
        assert "sampler_as_old" in objective.needs
    assert resolve(resolved).objective == resolved.objective


def test_the_scalerl_recipe_runs_with_the_overlap_that_it_suggests() -> None:
    settings = ["engine.kind=vllm", "overlap.staleness=8", "overlap.mode=copy"]
    assert objective_of(resolve(load_config("scalerl", settings))).correction is None


@pytest.mark.parametrize("name", ["scalerl", "bapo", "m2po"])
def test_algorithms_for_stale_rollouts_train_on_stale_rollouts(name: str, tmp_path: Path) -> None:
    notes = Notes()
    parts = parts_of(f"objective.name={name}", "overlap.staleness=1", "evaluate.every=0")
    folder = trained(parts, tmp_path / "run", notes)
    assert any("ratio to the engine's log-probs corrects" in note for note in notes.notes)
    ratios = [row["val/ratio_var"] for row in folder.steps()]
    assert ratios[0] < 1e-9
    assert ratios[1] > 1e-6


def test_the_cap_of_decoupled_ppo_matters_for_stale_rollouts(tmp_path: Path) -> None:
    def run(cap: float) -> tuple[list[float], Mapping[str, torch.Tensor]]:
        notes = Notes()
        settings = ["objective.name=decoupled_ppo", f"objective.cap={cap}", "overlap.staleness=2"]
        parts = parts_of(*settings, "evaluate.every=0")
        steps = trained(parts, tmp_path / str(cap), notes).steps()
        assert any("that of objective.name = 'decoupled_ppo'" in note for note in notes.notes)
        weights = {k: v.detach() for k, v in parts.policy.model.model.named_parameters()}
        return [row["policy/correction_dropped"] for row in steps], weights

    (wide, one), (narrow, other) = run(5.0), run(1.01)
    assert wide[0] == narrow[0] == 0.0  # these rollouts are not stale
    assert narrow[1] > wide[1] + 0.01
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_without_a_correction_the_ratio_is_to_the_engines_log_probs(tmp_path: Path) -> None:
    notes = Notes()
    parts = parts_of("overlap.staleness=1", "evaluate.every=0", "objective.correction=none")
    folder = trained(parts, tmp_path / "run", notes)
    assert any("ratio to the engine's log-probs corrects" in note for note in notes.notes)
    ratios = [row["val/ratio_var"] for row in folder.steps()]
    assert ratios[0] < 1e-9  # this step is generated with the weights that it starts from
    assert ratios[1] > 1e-6


def test_the_training_pass_computes_old_logp_as_an_extra_pass_does(tmp_path: Path) -> None:
    settings = ["overlap.staleness=1", "evaluate.every=0", "save.every=0"]
    in_pass, before = parts_of(*settings), parts_of(*settings, "train.old_logp=recompute")
    assert in_pass.settings.old_logp_in_pass
    assert not before.settings.old_logp_in_pass
    assert not parts_of(*settings, "train.mini_batches=2").settings.old_logp_in_pass
    one, two = (
        trained(parts, tmp_path / f"{number}").steps()
        for number, parts in enumerate((in_pass, before))
    )
    names = ("objective/rewards", "optim/grad_norm", "policy/correction_mean",
             "policy/correction_ess", "debug/rho_max")  # fmt: skip
    for row, other in zip(one, two, strict=True):
        assert [row[n] for n in names if n in row] == pytest.approx(
            [other[n] for n in names if n in row], rel=1e-4
        )
    assert one[2]["policy/correction_ess"] < 1.0
