"""SDPO: the policy as its own teacher, which reads the same tokens after a longer prompt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.collate import collate
from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.lab.plan.findings import findings
from covey.lab.plan.forecast import Device
from covey.lab.plan.memory import forecast
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.objective import build as build_objective
from covey.records.folder import RunFolder
from covey.reference.frozen import CurrentPolicy
from covey.rewards import Score
from covey.rollout.privileged import Privileged, check_context
from covey.run import Run
from covey.scoring import checked
from covey.step import filled_batch, train_on
from covey.types import Group, Rollout
from tests.conftest import build
from tests.training.test_step import PROMPT, learner, make_policy, rollout

SDPO = ("objective.name=sdpo", "teacher.policy=current")
QUICK = (
    "model.device=cpu", "evaluate.every=0", "rollout.prompts_per_step=3", "rollout.group_size=4",
    "train.steps=4", "save.every=2", "save.keep=9", "rollout.max_tokens=24",
)  # fmt: skip


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", [*SDPO, *settings]))


def groups_of(*prompts: tuple[int, ...]) -> list[Group]:
    """Return a group whose rollouts have these teacher prompts, with tokens of their own."""
    made = [
        replace(rollout(3 + n, float(n % 2), n), teacher_prompt=prompt)
        for n, prompt in enumerate(prompts)
    ]
    return [Group(prompt=PROMPT, rollouts=tuple(made))]


def self_taught(task: float = 0.0, **settings: object) -> Run:
    policy = make_policy()
    teacher = CurrentPolicy(model=policy.model, temperature=1.0, logits_megabytes=64.0)
    objective = build_objective("sdpo", task=task)
    return replace(learner(policy, objective, **settings), teacher=teacher)


def test_without_privileged_text_the_teacher_is_the_policy() -> None:
    own = (7, 8)  # the prompt of every rollout
    batch = filled_batch(self_taught(), groups_of(own, own, own), 1)
    assert batch.mask.sum() == 3 + 4 + 5
    assert batch.advantage is not None
    assert float(batch.advantage.abs().max()) < 1e-6
    assert float((batch.teacher_logp - batch.old_logp).abs().max()) < 1e-6


def test_the_teacher_reads_the_same_tokens_after_its_own_prompt() -> None:
    longer = [(7, 20, 21, 22, 8), (7, 8), (30,) * 11]
    learns = self_taught(micro_batch_tokens=30)
    batch = filled_batch(learns, groups_of(*longer), 1)
    for row, prompt in enumerate(longer):
        alone = rollout(3 + row, 0.0)
        (segment,) = alone.segments
        told = replace(alone, segments=(replace(segment, prompt_tokens=prompt),))
        found = batch_logp(
            learns.policy.model, collate([Group(prompt=PROMPT, rollouts=(told,))])
        ).logp
        mine = batch.teacher_logp[row, : 3 + row]
        torch.testing.assert_close(mine, found[0].detach(), atol=1e-5, rtol=0)
    gap = batch.teacher_logp - batch.old_logp
    torch.testing.assert_close(batch.advantage.float(), gap.where(batch.mask, 0.0))


def test_a_completion_without_text_is_left_out_and_counted() -> None:
    groups = groups_of((7, 20, 8), (), (7, 21, 8))
    learns = self_taught()
    batch = filled_batch(learns, groups, 1)
    assert batch.mask.sum(dim=1).tolist() == [3, 0, 5]
    assert train_on(groups, learns, 1).metrics["objective/taught"] == pytest.approx(2 / 3)
    # The other rows have the gradient that they would have alone: T counts their tokens only.
    both = replace(groups[0], rollouts=(groups[0].rollouts[0], groups[0].rollouts[2]))
    assert loss_of(groups) == pytest.approx(loss_of([both]), rel=1e-6)


def loss_of(groups: list[Group]) -> float:
    return train_on(groups, self_taught(), 1).metrics["loss/policy_avg"]


def test_beside_a_task_reward_it_keeps_the_advantage_of_its_group() -> None:
    batch = filled_batch(self_taught(task=0.5), groups_of((7, 20, 8), ()), 1)
    assert batch.mask.sum(dim=1).tolist() == [3, 4]
    assert batch.advantage[1, :4].tolist() == pytest.approx([0.5 * 0.5 / 0.5**0.5] * 4, rel=1e-5)


def test_nothing_to_teach_moves_nothing() -> None:
    learns = self_taught()
    before = [p.detach().clone() for p in learns.policy.model.model.parameters()]
    metrics = train_on(groups_of((), ()), learns, 1).metrics
    assert metrics["objective/taught"] == 0.0
    after = learns.policy.model.model.parameters()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True))


def test_micro_batches_change_only_the_rounding() -> None:
    groups = groups_of((7, 20, 21, 8), (), (7,) * 9, (7, 22, 8))
    wanted = gradient(groups, 10_000)
    size = max(float(value.abs().max()) for value in wanted.values())
    for tokens in (12, 25):
        found = gradient(groups, tokens)
        off = max(float((found[n] - wanted[n]).abs().max()) for n in wanted)
        assert off <= 1e-6 * size


def gradient(groups: list[Group], tokens: int) -> dict[str, torch.Tensor]:
    learns = self_taught(micro_batch_tokens=tokens, learning_rate=lambda *_: 0.0)
    kept: dict[str, torch.Tensor] = {}
    step = learns.policy.optimizer.step

    def watched(rate: float) -> Any:
        found = learns.policy.optimizer.gradients()
        kept.update({n: g.clone() for n, g in found.items() if g is not None})
        return step(rate)

    learns.policy.optimizer.step = watched  # type: ignore[method-assign]
    train_on(groups, learns, 1)
    return kept


# What the teacher reads.


def writer(model: LanguageModel, **context: str) -> Privileged:
    given = context or {"success": "Right: {text}", "feedback": "Wrong: {text}"}
    return Privileged(model=model, context=given, template="{prompt}\n{context}")


def answered(sample: int, text: str, reward: float | None, **fields: Any) -> Rollout:
    success = None if reward is None else reward > 0.5
    made = replace(rollout(2, reward, sample), text=text, success=success)
    return replace(made, **fields)


def test_a_correct_sibling_is_shown_and_never_the_completion_itself(
    embedded: LanguageModel,
) -> None:
    group = Group(
        prompt=PROMPT,
        rollouts=(
            answered(0, "one", 0.0, parts={"accuracy": 0.0, "format": 0.5}),
            answered(1, "two", 0.9),
            answered(2, "three", 1.0),
            answered(3, "four", None),
            answered(4, "five", 0.0, feedback="5 is too large"),
        ),
    )
    write = writer(embedded)
    assert [write.text(group, each) for each in group.rollouts] == [
        "Right: three\n\nWrong: accuracy 0, format 0.5", "Right: three", "Right: two",
        "Right: three", "Right: three\n\nWrong: 5 is too large",
    ]  # fmt: skip
    extended = write.extended(group)
    for each, text in zip(
        extended.rollouts, [write.text(group, r) for r in group.rollouts], strict=True
    ):
        told = {"role": "user", "content": f"?\n{text}"}
        assert each.teacher_prompt == embedded.encode([told])
        assert each.tokens == rollout(2, 0.0).tokens


def test_an_all_wrong_group_has_no_text_without_feedback(embedded: LanguageModel) -> None:
    group = Group(prompt=PROMPT, rollouts=tuple(answered(n, "no", 0.0) for n in range(3)))
    extended = writer(embedded, success="{text}").extended(group)
    assert [each.teacher_prompt for each in extended.rollouts] == [()] * 3


def test_a_column_of_the_data_and_the_target_may_be_privileged(embedded: LanguageModel) -> None:
    prompt = replace(PROMPT, target="4", columns={"solution": "2+2"})
    group = Group(prompt=prompt, rollouts=(answered(0, "5", 0.0),))
    write = writer(embedded, solution="So: {text}", target="= {text}")
    assert write.text(group, group.rollouts[0]) == "So: 2+2\n\n= 4"
    section = config_of("teacher.context={solution = '{text}'}").teacher
    check_context(section, prompt)
    with pytest.raises(
        ConfigError,
        match=r"teacher\.context contains 'solution', but the data has no such column.* target",
    ):
        check_context(section, PROMPT)


def test_a_prompt_that_does_not_fit_teaches_nothing() -> None:
    small = replace(build("llama"), context=30)
    group = Group(prompt=PROMPT, rollouts=(answered(0, "x" * 99, 1.0), answered(1, "short", 0.0)))
    extended = writer(small, success="{text}").extended(group)
    assert extended.rollouts[1].teacher_prompt == ()


def test_feedback_comes_from_the_score() -> None:
    result = checked(Score(reward=0.0, success=False, feedback="a brace is missing"))
    assert result.score is not None
    assert result.score.feedback == "a brace is missing"


# Configuration and plan.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["teacher.policy="], "teacher.policy to 'current', 'frozen' or 'moving'"),
        (["teacher.path=embedded"], "leave out teacher.path and teacher.url"),
        (["objective.name=opd"], "teacher.policy = 'current' works only with the objective sdpo"),
        (["teacher.alpha=0.1"], "teacher.alpha has no effect without teacher.policy = 'moving'"),
        (["teacher.temperature=0.5"], "teacher.temperature has no effect"),
        (["teacher.context={}"], "teacher.context is empty"),
        (
            ["teacher.context={success = 'x'}"],
            "teacher.context.success must contain the placeholder {text}",
        ),
        (["teacher.template={prompt}"], "teacher.template must contain the placeholder {context}"),
        (["environment.name=calculator"], "does not work with an environment"),
    ],
)
def test_a_self_teacher_that_cannot_work_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(*settings)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        (
            ["teacher.context={success = '{text}'}", "rollout.group_size=1"],
            "needs a second completion",
        ),
        (["teacher.context={success = '{text}'}"], "groups without a correct completion"),
        (["teacher.policy=moving", "teacher.alpha=1.0"], "the same as 'current'"),
        (["teacher.policy=moving", "teacher.every=100000"], "the same as 'frozen'"),
        (["objective.name=grpo"], "has no effect"),
    ],
)
def test_the_plan_knows_teachers_that_teach_nothing(settings: list[str], title: str) -> None:
    found = findings(config_of(*settings))
    about = [f for f in found if any(name.startswith("teacher.") for name in f.settings)]
    assert [title in f.title for f in about] == [True]
    assert [f for f in findings(config_of()) if f.docs.endswith("#teachers")] == []


def test_the_plan_counts_a_second_copy_only_if_there_is_one() -> None:
    device = Device(kind="cpu", memory=2**33, name="test")
    sizes = {
        policy: {
            p.name: p.bytes for p in forecast(config_of(f"teacher.policy={policy}"), device).parts
        }
        for policy in ("current", "frozen", "moving")
    }
    assert sizes["current"]["teacher"] == 0
    assert sizes["frozen"]["teacher"] == sizes["moving"]["teacher"] == sizes["frozen"]["weights"]


# A run.


def arguments(path: Path) -> list[str]:
    settings = (*SDPO, *QUICK, "teacher.policy=moving")
    return ["train", "--run", str(path), *(w for s in settings for w in ("--set", s))]


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert covey(arguments(whole)) == 0
    shutil.copytree(whole, parted)
    assert covey(["train", "--resume", str(parted), "--step", "2"]) == 0
    for file in ("model.safetensors", "teacher.safetensors"):
        a, b = (load_file(run / "checkpoints/000004" / file) for run in (whole, parted))
        assert all(torch.equal(a[name], b[name]) for name in a)
    rows = [timeless(run) for run in (whole, parted)]
    assert rows[0] == rows[1]
    assert all(0 < row["objective/taught"] <= 1 for row in rows[0])
    # The teacher has moved a little towards the policy, which has moved itself.
    start, policy = (
        load_file(whole / "checkpoints" / name / "model.safetensors")
        for name in ("000002", "000004")
    )
    teacher = load_file(whole / "checkpoints/000004/teacher.safetensors")
    name = next(n for n in teacher if n in policy and not torch.equal(start[n], policy[n]))
    assert not torch.equal(teacher[name], policy[name])
    recorded = RunFolder.open(whole).rollouts(1)
    assert any(row.get("teacher_prompt") for row in recorded)


def timeless(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
