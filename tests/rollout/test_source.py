"""The groups of a step: filters, refills, length penalty; and what training does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import RewardError
from covey.loop import train
from covey.objective import build as build_objective
from covey.objective import with_advantage, with_weight
from covey.objective.advantage import group_centered
from covey.objective.penalty import adapted_beta
from covey.policy.policy import Policy
from covey.records.folder import RunFolder
from covey.records.metric_registry import METRICS, metric
from covey.records.trackers.console import ConsoleTracker, summary
from covey.rewards import Score, ThinkAnswer, as_reward
from covey.rollout.collect import StepRollouts, collect_step, penalized
from covey.rollout.filter import (
    Selected,
    is_mixed,
    select,
    without_stale,
    without_truncated,
)
from covey.run import Run
from covey.scoring import InlineScorer
from covey.step import optimize, train_on
from covey.stopping import StopSignal
from covey.types import Batch, Group, Prompt, Rollout
from tests.conftest import make_batch
from tests.trackers import Notes
from tests.training.test_step import make_policy, settings

QUICK = ["train.steps=2", "rollout.prompts_per_step=6", "rollout.group_size=4", "evaluate.every=0"]


def parts_with(*overrides: str) -> Run:
    return Run.build(resolve(load_config("arithmetic", [*QUICK, *overrides])))


def groups_of(parts: Run, step: int = 1) -> StepRollouts:
    return collect_step(parts, step, Notes())


def group(name: str, *right: bool | None, age: int = 0, tokens: int = 3) -> Group:
    prompt = Prompt(id=name, task="t", messages=(), target="")
    rollouts = tuple(
        Rollout.single_turn(
            prompt_id=name, sample=n, prompt_tokens=(7,), tokens=(9,) * tokens,
            trained=(True,) * tokens, sampler_logp=(-0.5,) * tokens, text="", finish="stop",
            policy_version=10 - age, reward=None if r is None else float(r), success=r,
        )
        for n, r in enumerate(right)
    )  # fmt: skip
    return Group(prompt=prompt, rollouts=rollouts)


MIXED = group("mixed", True, False)
RIGHT = group("right", True, True)
WRONG = group("wrong", False, False)
OLD = group("old", True, False, age=3)
LONELY = group("lonely", True, None)
ALL = [MIXED, RIGHT, WRONG, OLD, LONELY]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Selected(groups=(MIXED, RIGHT, WRONG, OLD), unscored=1)),
        ({"dynamic": True}, Selected(groups=(MIXED, OLD), unscored=1, uniform=2)),
        ({"dynamic": True, "most": 0}, Selected(unscored=1, uniform=2, surplus=2)),
    ],
)
def test_every_dropped_group_has_one_reason(options: dict, expected: Selected) -> None:
    assert select(ALL, **options) == expected


@pytest.mark.parametrize(("version", "stale"), [(9, 0), (10, 1), (12, 1), (13, 4)])
def test_stale_groups_are_too_old_for_the_policy_that_trains(version: int, stale: int) -> None:
    groups = (OLD, MIXED, RIGHT, WRONG)
    found = without_stale(Selected(groups=groups, unscored=1), version=version, max_age=2)
    assert found == Selected(groups=groups[stale:], unscored=1, stale=stale)
    every = without_stale(Selected(groups=groups), version=version, max_age=0)
    assert every == Selected(groups=groups)


def test_dynamic_sampling_looks_at_success_and_not_at_reward() -> None:
    """With a length penalty a group that is all correct has reward variance. It is still dropped."""
    rollouts = tuple(
        replace(group("right", True, tokens=n).rollouts[0], reward=1.0 - 0.1 * n) for n in (5, 4, 3)
    )
    flat = replace(RIGHT, rollouts=rollouts)
    assert not is_mixed(flat)
    assert select([flat], dynamic=True).uniform == 1
    unscored = replace(MIXED, rollouts=(*RIGHT.rollouts, group("x", None).rollouts[0]))
    assert not is_mixed(unscored)


def test_dynamic_sampling_fills_the_step_with_prompts_it_has_not_used() -> None:
    parts = parts_with("filter.dynamic_sampling=true", "filter.max_rounds=6")
    found = groups_of(parts)
    assert all(is_mixed(g) for g in found.selected.groups)
    assert len(found.selected.groups) == 6
    assert found.rounds > 1
    ids = [g.prompt.id for g in found.collected.groups]
    assert len(ids) == len(set(ids))
    keys = [(rollout.prompt_id, rollout.sample) for rollout in found.collected.rollouts]
    assert len(keys) == len(set(keys))
    assert groups_of(parts).selected == found.selected
    other = groups_of(parts, step=2)
    assert {g.prompt.id for g in other.selected.groups} != set(ids)


class FailsAt:
    """The completions with these numbers, in the order of scoring, cannot be scored."""

    quick, version, bounds = True, 1, (0.0, 1.0)

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.count = numbers, 0

    def __call__(self, prompt: Prompt, text: str) -> Score:
        self.count += 1
        if self.count in self.numbers:
            raise KeyError("no such thing")
        return ThinkAnswer()(prompt, text)


def test_unscored_completions_are_a_share_of_the_step_and_not_of_a_refill() -> None:
    config = resolve(load_config("arithmetic", [*QUICK, "filter.dynamic_sampling=true"]))
    whole = groups_of(Run.build(config, FailsAt()))
    assert whole.rounds > 1
    count = len(whole.collected.rollouts)
    # The last two rollouts may be more than a tenth of a small refill.
    found = groups_of(Run.build(config, FailsAt(count - 1, count)))
    assert len(found.collected.failures) == 2 < 0.1 * len(found.collected.rollouts)
    with pytest.raises(RewardError, match="3 of 24 completions could not be scored"):
        groups_of(Run.build(config, FailsAt(1, 2, 3)))


def test_refills_stop_at_the_cap_and_leave_the_first_round_as_it_was() -> None:
    plain = groups_of(parts_with())
    capped = groups_of(parts_with("filter.dynamic_sampling=true", "filter.max_rounds=1"))
    assert capped.rounds == 1
    assert capped.collected.groups == plain.collected.groups
    assert len(capped.selected.groups) < 6
    assert capped.selected.uniform + len(capped.selected.groups) == 6


def everything_correct(prompt: Prompt, text: str) -> Score:
    return Score(reward=1.0, success=True)


def test_a_step_without_anything_to_learn_is_logged_and_changes_nothing(tmp_path: Path) -> None:
    parts = replace(
        parts_with("filter.dynamic_sampling=true"),
        scorer=InlineScorer(as_reward(everything_correct)),
    )
    before = [p.detach().clone() for p in parts.policy.model.model.parameters()]
    run, notes = RunFolder.create(tmp_path / "run", "", {}), Notes()
    assert train(parts, run, [notes], StopSignal()) == 2
    assert "no group to train on" in notes.notes[0]
    first, second = run.steps()
    assert first["rollout/trained_groups"] == 0
    assert first["rollout/rounds"] == 4
    assert (first["episode"], second["episode"]) == (4 * 6 * 4, 2 * 4 * 6 * 4)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, parts.policy.model.model.parameters(), strict=True)
    )


def test_steps_without_an_update_are_reported_like_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "run", "", {})
    parts = replace(
        parts_with("filter.dynamic_sampling=true"),
        scorer=InlineScorer(as_reward(everything_correct)),
    )
    train(parts, run, [ConsoleTracker(run, Console(soft_wrap=True))], StopSignal())
    output = capsys.readouterr().out
    assert "no group to train on" in output
    assert "step 2/2  reward 1.000  success 100.0%" in output


def test_a_step_of_masked_rollouts_keeps_its_beta(tmp_path: Path) -> None:
    options = ["objective.beta=0.1", "objective.kl_target=0.01", "rollout.max_tokens=1"]
    run = RunFolder.create(tmp_path / "run", "", {})
    train(parts_with(*options, "filter.mask_truncated=true"), run, [Notes()], StopSignal())
    assert [row["objective/beta"] for row in run.steps()] == [0.1, 0.1]
    assert "objective/kl_avg" not in run.steps()[0]


def test_a_length_penalty_is_a_part_of_its_own_and_lowers_the_reward(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "", {})
    parts = parts_with("length_penalty.name=soft", "rollout.max_tokens=30")
    assert parts.config.length_penalty.options == {"limit": 30, "cache": 6}
    train(parts, run, [Notes()], StopSignal())
    answers = run.rollouts(1)
    for answer in answers:
        penalty = -min(max(len(answer["tokens"]) - 24, 0), 6) / 6
        assert answer["parts"]["length_penalty"] == pytest.approx(penalty)
        expected = 0.9 * answer["parts"]["correct"] + 0.1 * answer["parts"]["format"] + penalty
        assert answer["reward"] == pytest.approx(expected)
    metrics = run.steps()[0]
    mean = sum(answer["parts"]["length_penalty"] for answer in answers) / len(answers)
    assert metrics["objective/parts/length_penalty"] == pytest.approx(mean)
    assert mean < 0
    assert f"(length penalty {mean:.3f})" in summary(metrics)
    assert metric("objective/parts/length_penalty") is METRICS["objective/parts/length_penalty"]


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("filter.drop_flat=true", lambda row: row["advantage"] is not None),
        ("filter.mask_truncated=true", lambda row: row["finish"] == "stop"),
    ],
)
def test_rollouts_that_a_filter_left_out_are_not_recorded_as_trained(
    tmp_path: Path, setting: str, kept: Callable[[dict[str, Any]], bool]
) -> None:
    run = RunFolder.create(tmp_path / "run", "", {})
    train(parts_with(setting, "rollout.max_tokens=30"), run, [Notes()], StopSignal())
    rows = [*run.rollouts(1), *run.rollouts(2)]
    assert {row["trained"] for row in rows} == {True, False}
    assert [row["trained"] for row in rows] == [kept(row) for row in rows]


def test_unscored_rollouts_get_no_length_penalty() -> None:
    done = penalized(LONELY, lambda rollouts: [-1.0] * len(rollouts))
    assert [r.reward for r in done.rollouts] == [0.0, None]


def test_masking_truncated_rollouts_keeps_them_in_statistics_and_counts() -> None:
    objective = build_objective("dapo")
    batch = make_batch(rows=6, seed=2)
    batch = replace(batch, truncated=torch.tensor([False, True, False, False, False, False]))
    whole = with_advantage(objective, batch)
    masked = without_truncated(whole)
    assert torch.equal(masked.advantage, whole.advantage)
    assert not masked.mask[1].any()
    assert torch.equal(masked.mask[0], whole.mask[0])
    weighted = with_weight(objective, masked)
    assert weighted.weight.sum() == pytest.approx(1.0)
    grpo = with_weight(build_objective("grpo"), masked)
    assert grpo.weight.sum() == pytest.approx(5 / 6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gtpo", "dapo", "rloo"])
def test_skipping_rows_without_gradient_changes_only_rounding(name: str) -> None:
    objective = build_objective(name, beta=0.0)
    batch = make_batch(rows=8, groups=2, seed=5)
    flat = batch.rewards.where(batch.group == 0, 1.0)
    success = batch.success.where(batch.group == 0, True)
    batch = replace(batch, rewards=flat, success=success, entropy=torch.rand(batch.mask.shape))
    weights, passes = [], []
    for skip in (False, True):
        policy = make_policy()
        taken = []
        forward = policy.model.backbone.forward
        policy.model.backbone.forward = lambda *a, _t=taken, _f=forward, **k: (
            _t.append(1) or _f(*a, **k)
        )
        learner = Run(
            policy=policy, objective=objective,
            settings=settings(skip_zero_gradient=skip, micro_batch_tokens=1),
        )  # fmt: skip
        optimize(learner, with_advantage(objective, batch), step=1)
        weights.append([p.detach().clone() for p in policy.model.model.parameters()])
        passes.append(len(taken))
    assert passes == [8, 4]
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_custom_advantage_may_read_old_and_reference_logp(beta: float) -> None:
    seen = []

    def advantage(batch: Batch) -> torch.Tensor:
        seen.append((batch.old_logp is not None, batch.ref_logp is not None))
        return group_centered(batch)

    parts = parts_with(f"objective.beta={beta}", "train.mini_batches=2")
    parts.objective = replace(parts.objective, advantage=advantage)
    train_on([differing("odd", True, False, False, True)], parts, 0)
    assert seen == [(True, beta > 0)]


def test_beta_is_the_same_without_the_rows_of_zero_advantage() -> None:
    betas = []
    for skip in ("false", "true"):
        parts = parts_with(
            "objective.name=composed", "objective.advantage=best_of_group", "objective.beta=0.1",
            "objective.kl=k1",
            "objective.kl_in=reward", "objective.kl_target=0.05", "objective.kl_horizon=10",
            "optimizer.learning_rate=1e-2", f"filter.skip_zero_gradient={skip}",
        )  # fmt: skip
        groups = [differing("odd", True, False, False, True)]
        for _ in range(3):
            parts.beta = train_on(groups, parts, 0).beta
        betas.append(parts.beta)
    assert betas[0] != 0.1
    assert betas[1] == pytest.approx(betas[0], rel=1e-4)


def test_one_pass_that_is_not_finite_leaves_an_adaptive_beta_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = parts_with("objective.beta=0.1", "objective.kl_target=1e-6", "train.mini_batches=1")
    groups = [differing("odd", True, False, False, True)]
    right = Policy.logp
    broken = lambda self, batch: right(self, batch)._replace(  # noqa: E731
        logp=right(self, batch).logp * math.nan
    )
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "logp", broken)
        _, metrics, parts.beta = train_on(groups, parts, 0)
    assert metrics["optim/skipped"] == 1
    assert math.isnan(metrics["objective/kl_avg"])
    assert parts.beta == 0.1
    _, metrics, _ = train_on(groups, parts, 0)
    assert metrics["optim/skipped"] == 0


def differing(name: str, *right: bool) -> Group:
    """A group whose completions differ."""
    alike = group(name, *right)
    differ = [
        replace(r, segments=(replace(r.segments[0], tokens=(9 + n, 20, 40 + n)),))
        for n, r in enumerate(alike.rollouts)
    ]
    return replace(alike, rollouts=tuple(differ))


@pytest.mark.parametrize(("name", "rows"), [("grpo", 4), ("gspo", 4), ("gtpo", 8), ("tis", 8)])
def test_old_logp_is_taken_of_rows_with_gradient_alone(name: str, rows: int) -> None:
    # gtpo's advantages need the entropies of all, a correction counts all.
    correction = ["objective.correction=token_truncate"] if name == "tis" else []
    algorithm = "grpo" if name == "tis" else name
    groups = [differing("even", True, True, True, True), differing("odd", True, False, False, True)]
    weights = []
    for skip in (False, True):
        parts = parts_with(
            f"objective.name={algorithm}", "objective.beta=0.0", *correction,
            "optimizer.learning_rate=1e-3", "train.mini_batches=2", "train.epochs=2",
            "train.old_logp=recompute", "train.micro_batch_tokens=1",
            f"filter.skip_zero_gradient={str(skip).lower()}",
        )  # fmt: skip
        taken, backbone = [], parts.policy.model.backbone
        backbone.register_forward_hook(lambda *_, _t=taken: _t.append(torch.is_grad_enabled()))
        train_on(groups, parts, 0)
        assert taken.count(False) == (rows if skip else 8)  # a pass for every row
        weights.append([p.detach().clone() for p in parts.policy.model.model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_a_batch_without_any_gradient_still_takes_its_optimizer_steps() -> None:
    objective = build_objective("dapo")
    policy = make_policy()
    flat = replace(make_batch(rows=8), rewards=torch.ones(8, dtype=torch.float64))
    learner = Run(
        policy=policy, objective=objective,
        settings=settings(skip_zero_gradient=True, mini_batches=2),
    )  # fmt: skip
    metrics = optimize(learner, with_advantage(objective, flat), step=1)
    assert policy.version == 2
    assert metrics["optim/grad_norm"] == 0.0


def test_a_batch_of_truncated_rollouts_alone_has_a_gradient_of_zero() -> None:
    objective = build_objective("dapo")
    policy = make_policy()
    batch = replace(make_batch(rows=4), truncated=torch.ones(4, dtype=torch.bool))
    batch = without_truncated(with_advantage(objective, batch))
    learner = Run(policy=policy, objective=objective, settings=settings())
    metrics = optimize(learner, batch, step=1)
    assert metrics["optim/grad_norm"] == 0.0
    assert metrics["loss/policy_avg"] == 0.0


def test_beta_follows_the_kl() -> None:
    adapt = lambda kl: adapted_beta(0.1, kl, target=0.02, horizon=1000, rollouts=100)  # noqa: E731
    assert adapt(0.02) == pytest.approx(0.1)
    assert adapt(0.022) == pytest.approx(0.1 * 1.01)
    assert adapt(9.0) == pytest.approx(0.1 * 1.02)
    assert adapt(0.0) == pytest.approx(0.1 * 0.98)


def test_an_adaptive_beta_is_logged_saved_and_resumed(tmp_path: Path) -> None:
    options = ["objective.beta=0.1", "objective.kl_target=1e-6", "objective.kl_horizon=24"]
    options.append("optimizer.schedule=constant")
    steps = {}
    for name, count in (("whole", 4), ("resumed", 2)):
        run = RunFolder.create(tmp_path / name, "", {})
        train(parts_with(*options, f"train.steps={count}"), run, [Notes()], StopSignal())
        steps[name] = run
    train(parts_with(*options, "train.steps=4"), steps["resumed"], [Notes()], StopSignal())
    betas = [row["objective/beta"] for row in steps["whole"].steps()]
    assert betas[0] == 0.1
    assert betas == sorted(betas)
    assert betas[-1] > betas[1]
    assert [row["objective/beta"] for row in steps["resumed"].steps()] == betas
    kl = [row["objective/kl_avg"] for row in steps["whole"].steps()]
    assert [row["objective/kl_avg"] for row in steps["resumed"].steps()] == kl
