"""What gdpo, the off-policy losses and a distillation need in a run: parts, sampler ratios, a teacher."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.collate import collate
from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError, ModelError
from covey.models.logp import batch_logp
from covey.objective import build as build_objective
from covey.objective import with_advantage
from covey.reference import FrozenReference
from covey.reference.build import make_teacher
from covey.rollout.filter import Selected, select
from covey.step import check_finite, optimize, prepare
from covey.types import Group
from tests.conftest import build, make_batch
from tests.training.test_step import PROMPT, learner, make_policy, rollout


def with_parts(reward: float | None, sample: int = 0, **parts: float) -> Any:
    return replace(rollout(2, reward, sample), parts=parts)


def group(*rollouts: Any) -> Group:
    return Group(prompt=PROMPT, rollouts=tuple(rollouts))


def test_parts_are_columns_in_the_order_of_their_names() -> None:
    groups = [
        group(with_parts(1.0, tidy=0.5, correct=1.0), with_parts(None)),
        group(with_parts(0.0, correct=0.0, tidy=0.25)),
    ]
    assert collate(groups).parts is None
    every, chosen = collate(groups, parts=()).parts, collate(groups, parts=("tidy",)).parts
    assert every is not None
    assert chosen is not None
    assert every.dtype == torch.float64
    assert every[[0, 2]].tolist() == [[1.0, 0.5], [0.0, 0.25]]  # correct, tidy
    assert every[1].isnan().all()
    assert chosen[[0, 2]].tolist() == [[0.5], [0.25]]
    assert math.isnan(chosen[1, 0])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "objective: the reward of completion 1 of prompt p has no part 'tidy', only correct; list in objective.parts only parts that every completion has"),
        (("correct", "form"), "objective: the reward of completion 0 of prompt p has no part 'form', only correct, tidy; list in objective.parts only parts that every completion has"),
    ],
)  # fmt: skip
def test_a_part_that_is_missing_is_named(parts: tuple[str, ...], message: str) -> None:
    rollouts = with_parts(1.0, correct=1.0, tidy=0.5), with_parts(0.0, 1, correct=0.0)
    with pytest.raises(ConfigError) as raised:
        collate([group(*rollouts)], parts=parts)
    assert str(raised.value) == message


def test_a_reward_without_parts_cannot_be_compared_part_by_part() -> None:
    with pytest.raises(ConfigError, match="this reward has no parts"):
        collate([group(with_parts(1.0), with_parts(0.0))], parts=())


def test_flat_groups_are_dropped_by_reward_and_not_by_success() -> None:
    flat = group(rollout(1, 0.3), rollout(1, 0.1 + 0.2), rollout(1, None))
    mixed = group(rollout(1, 0.3), rollout(1, 0.4))
    wanted = Selected(groups=(mixed,), uniform=1)
    assert select([flat, mixed], drop_flat=True) == wanted
    assert select([flat, mixed]).groups == (flat, mixed)


@pytest.mark.parametrize("name", ["bapo", "m2po", "scalerl"])
def test_ratios_to_the_sampler_need_no_forward_pass(name: str) -> None:
    policy, batch = make_policy(), make_batch()
    filled = prepare(learner(policy, build_objective(name)), batch)
    assert filled.old_logp is batch.sampler_logp
    assert filled.entropy is None
    both = prepare(learner(policy, build_objective(name, top_entropy=0.5)), batch)
    assert both.old_logp is batch.sampler_logp
    assert both.entropy is not None


def perturbed() -> FrozenReference:
    teacher = build("llama")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in teacher.model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return FrozenReference(model=teacher, temperature=1.0, logits_megabytes=64.0)


def test_a_step_of_distillation_moves_towards_the_teacher() -> None:
    policy, teacher, objective = make_policy(), perturbed(), build_objective("opd")
    batch = make_batch(rows=8)
    learns = replace(learner(policy, objective), teacher=teacher)
    filled = prepare(learns, batch)
    expected = batch_logp(teacher.model, batch).logp.detach()
    torch.testing.assert_close(filled.teacher_logp, expected, atol=1e-5, rtol=0)
    assert filled.old_logp is not None
    gap = (filled.old_logp - expected)[batch.mask]
    metrics = optimize(learns, with_advantage(objective, filled), 1)
    assert metrics["objective/teacher_kl"] == pytest.approx(gap.mean().item(), abs=1e-5)
    assert metrics["objective/teacher_floored"] == 0.0
    # Tokens that the teacher finds likelier than the policy did have become likelier, and so on.
    moved = (batch_logp(policy.model, batch).logp.detach() - filled.old_logp)[batch.mask]
    assert float((moved * -gap).sum()) > 0


def test_tokens_that_a_teacher_finds_impossible_are_counted_and_floored() -> None:
    policy, objective = make_policy(), build_objective("opd")
    batch = prepare(replace(learner(policy, objective), teacher=perturbed()), make_batch(rows=8))
    assert batch.teacher_logp is not None
    teacher_logp = batch.teacher_logp.clone()
    place = batch.mask.nonzero()[0]
    teacher_logp[*place] = -300.0
    batch = with_advantage(objective, replace(batch, teacher_logp=teacher_logp))
    assert batch.advantage is not None
    assert batch.old_logp is not None
    lowest = -20.0 - float(batch.old_logp[*place])
    assert float(batch.advantage[*place]) == pytest.approx(lowest, rel=1e-6)
    metrics = optimize(learner(policy, objective), batch, 1)
    assert metrics["objective/teacher_floored"] == pytest.approx(1 / int(batch.mask.sum()))


def test_a_teacher_that_gives_no_numbers_stops_the_run() -> None:
    batch = make_batch()
    broken = replace(batch, teacher_logp=torch.full(batch.mask.shape, torch.nan))
    with pytest.raises(
        ModelError, match="training stopped at step 3, because the log-probs of the teacher"
    ):
        check_finite(broken, 3)


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", settings))


PKPO, TEACHER = "objective.name=pkpo", "objective.name=opd"
ONE_TEACHER = "config: the chosen objective needs a teacher; set either teacher.path or teacher.url"
TRUNCATED = "but rollout.top_k, top_p or min_p truncates the engine's distribution; set rollout.mask_replay = true"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([PKPO, "objective.k=9"], "config: objective.k = 9 needs rollout.group_size of at least 9, not 8"),
        ([PKPO, "objective.k=8", "objective.baseline=centred"], "config: objective.k = 8 needs rollout.group_size of at least 9, not 8"),
        (["objective.name=gdpo", "objective.part_weights=[1.0, 2.0]"], "config: objective.part_weights depends on the order of the reward parts; list the parts in objective.parts"),
        (["objective.name=gdpo", "objective.gate=0"], "config: objective.gate depends on the order of the reward parts; list the parts in objective.parts"),
        (["objective.name=gdpo", "objective.beta=0.1", "objective.kl_in=reward"], "objective.kl_in = 'reward' does not work with gdpo, which normalizes each part of the reward separately; set objective.kl_in = 'loss'"),
        (["objective.name=bapo", "rollout.top_p=0.9"], f"config: the algorithm bapo divides by the engine's probabilities, {TRUNCATED}"),
        (["objective.name=m2po", "objective.veto=0.1"], "config: the algorithm m2po already divides by the engine's probabilities, so objective.correction and objective.veto have nothing to correct; leave out both settings"),
        ([TEACHER], ONE_TEACHER),
        ([TEACHER, "teacher.path=a", "teacher.url=http://b"], ONE_TEACHER),
        ([TEACHER, "teacher.path=a", "teacher.timeout=3"], "config: teacher.timeout has no effect without teacher.url; set teacher.url, or leave out teacher.timeout"),
        ([TEACHER, "teacher.url=http://b", "teacher.offload=true"], "config: teacher.offload has no effect without teacher.path; set teacher.path, or leave out teacher.offload"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(*settings)
    assert str(raised.value) == message


def test_groups_as_large_as_k_suffice() -> None:
    assert config_of(PKPO, "objective.k=8").objective.options["k"] == 8
    options = ["objective.k=7", "objective.baseline=centred"]
    assert config_of(PKPO, *options).objective.options["baseline"] == "centred"


def test_a_teacher_with_other_tokens_is_refused() -> None:
    config = config_of(TEACHER, "teacher.path=other")
    policy, other = build("llama"), build("llama")
    assert make_teacher(config, policy=policy, load=lambda path: other).identity == "frozen"
    other.tokenizer.add_tokens(["<one more>"])
    with pytest.raises(ConfigError) as raised:
        make_teacher(config, policy=policy, load=lambda path: other)
    assert str(raised.value) == (
        "config: teacher.path = 'other' has a different tokenizer than model.path = 'embedded'; choose a teacher with the policy's tokenizer"
    )
