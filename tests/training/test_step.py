import math
from dataclasses import replace

import pytest
import torch

from covey.collate import collate
from covey.models.logp import batch_logp
from covey.objective import Objective, with_advantage
from covey.objective import build as build_objective
from covey.objective.diagnostics import Meter
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.reference import FrozenReference
from covey.rollout.filter import Selected, age, select
from covey.run import Run
from covey.step import RowFacts, StepSettings, optimize, prepare
from covey.types import Group, Prompt, Rollout
from tests.conftest import build, make_batch

PROMPT = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="")


def rollout(tokens: int, reward: float | None, sample: int = 0) -> Rollout:
    return Rollout.single_turn(
        prompt_id="p", sample=sample, prompt_tokens=(7, 8), tokens=tuple(range(9, 9 + tokens)),
        trained=(True,) * tokens, sampler_logp=(-0.5,) * tokens, text="", finish="stop",
        policy_version=0, reward=reward, success=None if reward is None else reward > 0,
    )  # fmt: skip


def settings(**changes: object) -> StepSettings:
    base = StepSettings(
        mini_batches=1, epochs=1, micro_batch_tokens=10_000, old_logp_from_sampler=False,
        learning_rate=lambda *_: 1e-3, seed=0,
    )  # fmt: skip
    return replace(base, **changes)


def learner(policy: Policy, objective: Objective, **changes: object) -> Run:
    return Run(policy=policy, objective=objective, settings=settings(**changes))


def make_policy(name: str = "llama") -> Policy:
    model = build(name)
    optimizer = MasterAdamW(
        model.model.named_parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    return Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=64.0)


def test_collate_keeps_rows_masks_and_failures() -> None:
    groups = [
        Group(prompt=PROMPT, rollouts=(rollout(3, 1.0), rollout(1, None))),
        Group(prompt=PROMPT, rollouts=(rollout(2, 0.0),)),
    ]
    batch = collate(groups)
    assert batch.tokens.tolist() == [[9, 10, 11], [9, 0, 0], [9, 10, 0]]
    assert batch.mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.rollout.tolist() == [0, 1, 2]
    assert batch.rewards.dtype == torch.float64
    assert batch.rewards[0] == 1.0
    assert math.isnan(batch.rewards[1])
    assert batch.success.tolist() == [True, False, False]


def test_select_drops_groups_with_nothing_to_compare() -> None:
    whole = Group(prompt=PROMPT, rollouts=(rollout(1, 1.0), rollout(1, 0.0)))
    lonely = Group(prompt=PROMPT, rollouts=(rollout(1, 1.0), rollout(1, None)))
    assert select([whole, lonely]) == Selected(groups=(whole,), unscored=1)


def test_a_rollout_without_tokens_makes_no_group_old() -> None:
    sampled = Rollout.single_turn(
        prompt_id="p", sample=0, prompt_tokens=(7,), tokens=(9,), sampler_logp=(-0.5,), text="",
        finish="stop", policy_version=5,
    )  # fmt: skip
    failed = rollout(0, None, sample=1)
    assert age(Group(prompt=PROMPT, rollouts=(sampled, failed)), version=7) == 2
    assert age(Group(prompt=PROMPT, rollouts=(failed,)), version=7) == 0


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (3, 1), (2, 2), (5, 3)])
def test_every_epoch_visits_every_row_once_and_keeps_groups_together(
    mini_batches: int, epochs: int
) -> None:
    batch = make_batch(rows=12, groups=4)
    wanted = settings(mini_batches=mini_batches, epochs=epochs)
    batch = with_advantage(build_objective("grpo", beta=0.0), batch)
    parts = list(RowFacts.of(batch, skip=False).mini_batches(wanted, step=5))
    assert len(parts) == mini_batches * epochs
    for epoch in range(epochs):
        rows = torch.cat(parts[epoch * mini_batches : (epoch + 1) * mini_batches])
        assert sorted(rows.tolist()) == list(range(12))
        changes = (batch.group[rows].diff() != 0).sum()
        assert changes == 3


def test_old_logp_is_computed_only_when_something_reads_it() -> None:
    policy = make_policy()
    objective = build_objective("grpo", beta=0.0)
    batch = make_batch()
    calls = []
    original = policy.model.backbone.forward
    policy.model.backbone.forward = lambda *a, **k: calls.append(1) or original(*a, **k)

    def prepared(**changes: object):
        calls.clear()
        return prepare(learner(policy, objective, **changes), batch)

    assert prepared().old_logp is None
    assert not calls
    assert prepared(mini_batches=2, old_logp_from_sampler=True).old_logp is batch.sampler_logp
    assert not calls
    recomputed = prepared(mini_batches=2, micro_batch_tokens=30)
    assert len(calls) > 1
    expected = batch_logp(policy.model, batch)
    torch.testing.assert_close(recomputed.old_logp, expected.logp.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(recomputed.entropy, expected.entropy.detach(), atol=1e-5, rtol=0)


def test_a_frozen_reference_is_the_starting_policy_and_stays_so() -> None:
    policy = make_policy()
    reference = FrozenReference(model=build("llama"), temperature=1.0, logits_megabytes=64.0)
    objective = build_objective("grpo", beta=0.1)
    batch = make_batch(rows=8)
    learns = replace(learner(policy, objective), reference=reference)
    fill = lambda: prepare(learns, batch)  # noqa: E731
    start = fill().ref_logp
    torch.testing.assert_close(start, batch_logp(policy.model, batch).logp.detach())
    for step in range(1, 4):
        metrics = optimize(learner(policy, objective), with_advantage(objective, fill()), step)
        assert (metrics["objective/kl_avg"] > 1e-6) == (step > 1)
    assert torch.equal(fill().ref_logp, start)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_metrics_and_weights_do_not_depend_on_the_token_budget(budget: int) -> None:
    objective = build_objective("grpo", beta=0.0)
    results = []
    for tokens in (budget, 10_000):
        policy = make_policy()
        batch = make_batch(rows=10, longest=12)
        learns = learner(policy, objective, mini_batches=2, epochs=2, micro_batch_tokens=tokens)
        metrics = optimize(learns, with_advantage(objective, prepare(learns, batch)), step=1)
        results.append((metrics, policy.model.head.linear.weight.detach().clone()))
    (first, weights), (second, expected) = results
    for metrics in (first, second):
        assert metrics.pop("other/packed_ratio") > 0  # of micro-batches, so it does
    assert first == {
        name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in second.items()
    }
    torch.testing.assert_close(weights, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("stale", [False, True])
def test_the_kl_is_of_the_policy_that_sampled(stale: bool) -> None:
    policy = make_policy()
    reference = FrozenReference(model=build("llama"), temperature=1.0, logits_megabytes=64.0)
    objective, batch = build_objective("grpo", beta=0.1), make_batch(rows=8, groups=2, seed=5)
    learns = learner(policy, objective, mini_batches=2, epochs=2, stale=stale)
    learns = replace(learns, reference=reference)
    for step in (1, 2):
        filled = prepare(learns, batch)
        metrics = optimize(learns, with_advantage(objective, filled), step)
        sampled = filled.sampler_logp if stale else filled.old_logp
        gap = (sampled - filled.ref_logp).where(filled.mask, 0.0).double().sum(dim=1)
        assert metrics["objective/kl"] == pytest.approx(float(gap.mean()), abs=1e-6)
        assert metrics["objective/kl2"] >= 0
        if step == 1 and not stale:  # the policy moves away, but its samples are the reference's
            assert metrics["objective/kl"] == pytest.approx(0.0, abs=1e-5)
            assert metrics["objective/kl_avg"] > 1e-6


@pytest.mark.parametrize("name", ["grpo", "dapo", "scalerl"])
def test_an_unscored_rollout_counts_in_no_denominator(name: str) -> None:
    objective = build_objective(name, **({"beta": 0.0} if name == "grpo" else {}))
    batch = make_batch(rows=10, groups=2, seed=5)
    rewards = batch.rewards.clone()
    rewards[[1, 6]] = math.nan
    rest = torch.tensor([n for n in range(10) if n not in (1, 6)])
    failed = replace(batch, rewards=rewards)
    found = []
    for each in (failed, failed.rows(rest)):
        policy = make_policy()
        learns = learner(policy, objective, old_logp_from_sampler=True)
        filled = with_advantage(objective, prepare(learns, each))
        metrics = optimize(learns, filled, step=1)
        found.append([metrics["loss/policy_avg"], metrics["optim/grad_norm"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)
    assert found[0][1] > 1e-3


def test_a_step_raises_the_probability_of_better_completions() -> None:
    policy = make_policy()
    objective = build_objective("grpo", beta=0.0)
    batch = with_advantage(objective, make_batch(rows=8, groups=2, seed=5))
    before = batch_logp(policy.model, batch).logp.detach()
    for step in range(5):
        optimize(learner(policy, objective), batch, step)
    change = (batch_logp(policy.model, batch).logp.detach() - before).sum(dim=1)
    advantage = batch.advantage.sum(dim=1)
    assert (change[advantage > 0.5] > 0).all()
    assert (change[advantage < -0.5] < 0).all()
    assert policy.version == 5


def test_meter_pools_sums_and_counts() -> None:
    meter = Meter()
    mask = torch.tensor([[True, True, False]])
    meter.means({"x": torch.tensor([[1.0, 2.0, math.nan]])}, mask)
    meter.means({"x": torch.tensor([[9.0, math.inf, 5.0]])}, torch.tensor([[True, False, False]]))
    meter.extremes("y", torch.tensor([[1.0, 2.0, 9.0]]), mask)
    meter.extremes("y", torch.tensor([[1.5, 2.0, -9.0]]), mask)
    meter.extremes("unseen", torch.tensor([[1.0, 2.0, 9.0]]), torch.zeros_like(mask))
    meter.add("nothing", 0.0, 0.0)
    assert meter.measured().means() == {"x": 4.0, "y_min": 1.0, "y_max": 2.0}


def test_a_gradient_that_is_not_finite_is_counted_and_spoils_no_other_metric() -> None:
    policy = make_policy()
    objective = build_objective("grpo", beta=0.0)
    batch = with_advantage(objective, make_batch(rows=8, groups=2, seed=5))
    spoiled = batch.advantage.clone()
    spoiled[batch.group == 1] = math.inf
    spoiled = replace(batch, advantage=spoiled.where(batch.mask, 0.0))
    metrics = optimize(learner(policy, objective, mini_batches=2), spoiled, step=1)
    assert metrics["optim/skipped"] == 1
    assert math.isfinite(metrics["optim/grad_norm"])
    assert all(p.isfinite().all() for p in policy.model.model.parameters())


def test_rows_that_are_skipped_leave_no_ratios_behind() -> None:
    policy, objective = make_policy(), build_objective("grpo", beta=0.0)
    batch = make_batch(rows=8, groups=2)
    # A sampler that truncates says more of its tokens than the policy; one group is all alike.
    batch = replace(
        batch,
        rewards=batch.rewards.where(batch.group == 0, 1.0),
        sampler_logp=batch_logp(policy.model, batch).logp.detach() + 0.5,
    )
    still = learner(
        policy, objective,
        mini_batches=2, skip_zero_gradient=True, learning_rate=lambda *_: 0.0,
    )  # fmt: skip
    batch = prepare(still, with_advantage(objective, batch))
    metrics = optimize(still, batch, step=1)
    assert metrics["val/ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/approxkl_avg"] == pytest.approx(0.0, abs=1e-9)
    flat = with_advantage(objective, replace(batch, rewards=torch.ones(8).double()))
    nothing = optimize(still, flat, step=1)
    assert nothing["loss/policy_avg"] == nothing["optim/grad_norm"] == 0.0
    assert "val/ratio" not in nothing
