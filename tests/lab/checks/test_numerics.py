"""Every cause, measured on completions of the embedded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from covey.collate import collate
from covey.config import load_config
from covey.config.resolve import resolve
from covey.embedded import CHECKPOINT
from covey.lab.checks.numerics import (
    Report,
    alone_logp,
    clip_range,
    common_prefix,
    default_updates,
    log_kept,
    measure,
    upcast,
    wide_logp,
)
from covey.models.logp import LogProbs
from covey.rollout.collect import collect_step
from covey.run import Run
from covey.types import Batch, Group, Prompt, Rollout
from tests.trackers import Notes

SMALL = (
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=40", "train.micro_batch_tokens=150",
    "optimizer.learning_rate=1e-4", "task.min_operations=2", "seed=3",
)  # fmt: skip


def parts_of(*settings: str) -> Run:
    return Run.build(resolve(load_config(None, (*SMALL, *settings))))


def report_of(*settings: str, updates: int = 1, alone: int = 4) -> Report:
    parts = parts_of(*settings)
    return measure(parts, Notes(), updates=updates, alone=alone)


def lines(report: Report) -> dict[str, Any]:
    return {cause.name: cause.gap for cause in report.causes}


@pytest.fixture(scope="module")
def exact() -> Report:
    return report_of()


def test_in_float32_on_a_cpu_only_staleness_makes_a_difference(exact: Report) -> None:
    found = lines(exact)
    assert list(found) == [
        "total", "precision", "micro_batch", "slots", "truncation", "kernel", "staleness",
    ]  # fmt: skip
    stale = found.pop("staleness")
    for gap in found.values():
        assert gap.max <= 1e-5
        assert gap.severity == "harmless"
    assert found["precision"].max == found["truncation"].max == 0.0
    assert found["total"].max > 0.0  # two ways through the model, not one number twice
    assert stale.mean > 100 * found["total"].mean
    assert (exact.completions, exact.alone, exact.diverged) == (8, 4, 0)
    assert found["slots"].tokens == found["kernel"].tokens < found["total"].tokens


@pytest.mark.parametrize("setting", ["top_p=0.8", "top_k=3", "min_p=0.2"])
def test_truncation_is_the_log_of_the_kept_mass(setting: str) -> None:
    report = report_of(f"rollout.{setting}", "rollout.temperature=1.5", updates=0)
    name, _, value = setting.partition("=")
    expected = torch.tensor(log_kept_by_hand(f"rollout.{setting}", name, float(value)))
    found = lines(report)
    assert found["truncation"].tokens == len(expected)
    assert found["truncation"].mean == pytest.approx(float(-expected.mean()), abs=2e-6)
    assert found["truncation"].max == pytest.approx(float(-expected.min()), abs=1e-5)
    assert found["truncation"].ratio_mean == pytest.approx(float(expected.exp().mean()), abs=2e-6)
    assert found["truncation"].max > 0.1
    assert found["total"].mean == pytest.approx(found["truncation"].mean, abs=2e-6)
    assert found["kernel"].max <= 1e-5  # it is taken out there
    assert found["slots"].max <= 1e-5
    none = found["staleness"]  # after no step
    assert none.max == 0.0
    assert (none.ratio_mean, none.outside, none.effective) == (1.0, 0.0, 1.0)


def log_kept_by_hand(setting: str, name: str, value: float) -> list[float]:
    """The mass that stays, from transformers' own logits, token by token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    kept = []
    for group in groups_of(parts_of(setting, "rollout.temperature=1.5")):
        for r in group.rollouts:
            with torch.no_grad():
                logits = model(torch.tensor([[*r.prompt_tokens, *r.tokens]])).logits[0]
            for row in logits[len(r.prompt_tokens) - 1 : -1].double():
                masses = sorted((row / 1.5).softmax(0).tolist(), reverse=True)
                if name == "top_k":
                    masses = masses[: int(value)]
                elif name == "min_p":
                    masses = [mass for mass in masses if mass >= value * masses[0]]
                else:
                    count = next(n for n in range(len(masses)) if sum(masses[: n + 1]) >= value)
                    masses = masses[: count + 1]
                kept.append(min(0.0, torch.tensor(sum(masses)).double().log().item()))
    return kept


def groups_of(parts: Run) -> tuple[Group, ...]:
    return collect_step(parts, 1, Notes()).selected.groups


def test_in_bfloat16_precision_dominates() -> None:
    found = lines(
        report_of(
            "model.dtype=bfloat16", "rollout.group_size=2", "rollout.max_tokens=12",
            updates=0, alone=2,
        )
    )  # fmt: skip
    # In float32 it is 4e-7.
    assert found["precision"].mean > 1e-4
    assert found["total"].mean > 1e-4
    for name in ("micro_batch", "slots", "truncation", "staleness"):
        assert found[name].mean < found["precision"].mean, name
    # Two ways that each round in places of their own are no further apart than both together.
    assert found["kernel"].max <= 3 * found["precision"].max
    assert found["truncation"].max == found["staleness"].max == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bfloat16", 1e-4, 0.05), ("float32", 0, 1e-4)]
)
def test_on_a_gpu_every_line_is_measured(dtype: str, least: float, most: float) -> None:
    found = lines(report_of("model.device=cuda", f"model.dtype={dtype}", "rollout.top_p=0.9"))
    assert least <= found["precision"].mean <= most
    for name in ("micro_batch", "slots", "kernel"):
        assert found[name].mean <= most, name
    assert 0.0 < found["truncation"].mean < 0.11  # -log 0.9
    assert found["staleness"].mean > 0.0


def test_the_float32_pass_uses_the_rounded_weights() -> None:
    parts = parts_of("model.dtype=bfloat16", "rollout.group_size=2", "rollout.max_tokens=8")
    model, groups = parts.policy.model, groups_of(parts)
    batch = collate(groups)
    found = wide_logp(parts.policy, batch, 10_000)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    for row, r in enumerate(r for g in groups for r in g.rollouts):
        with torch.no_grad():
            logits = rounded.float()(torch.tensor([[*r.prompt_tokens, *r.tokens]])).logits[0]
        logp = logits[len(r.prompt_tokens) - 1 : -1].log_softmax(-1)
        expected = logp.gather(1, torch.tensor(r.tokens)[:, None]).squeeze(1)
        assert torch.allclose(found[row, : len(r.tokens)], expected, atol=1e-5)
    wide = upcast(model)
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    assert wide.head.linear is wide.model.get_output_embeddings()


def test_staleness_grows_with_optimizer_steps() -> None:
    one, two = (c.gap.mean for c in report_of(updates=2).causes if c.name == "staleness")
    assert 0.0 < one < two
    still = report_of("optimizer.learning_rate=0.0", updates=1)
    assert lines(still)["staleness"].max == 0.0


def test_steps_without_advantages_get_a_note() -> None:
    # Unreachable length: every answer is wrong, and so are all groups the same.
    report = report_of("rollout.max_tokens=2", updates=1, alone=2)
    assert lines(report)["staleness"].max == 0.0
    assert [note.partition(":")[0] for note in report.notes] == ["staleness"]
    # A bonus for entropy moves the policy without any advantage.
    moved = report_of("rollout.max_tokens=2", "objective.entropy_bonus=0.1", updates=1, alone=2)
    assert lines(moved)["staleness"].max > 0.0
    assert not moved.notes


def test_bounds_that_are_not_of_ratios_get_a_note() -> None:
    report = report_of("objective.name=dppo", "rollout.max_tokens=2", updates=0, alone=2)
    assert [note.partition(":")[0] for note in report.notes] == ["outside"]


@pytest.mark.parametrize(
    ("settings", "low", "high", "per_completion"),
    [
        (("objective.clip_high=0.28",), 0.8, 1.28, False),
        (("objective.name=gspo",), 1 - 3e-4, 1 + 4e-4, True),
        (("objective.name=gmpo",), 0.670320, 1.491825, False),  # exp(-0.4), exp(0.4)
        (
            ("objective.name=composed", "objective.surrogate=geometric_clipped"),
            0.670320,
            1.491825,
            False,
        ),
        # Bounds of probabilities, which say nothing of ratios: grpo's stand for them.
        (
            ("objective.name=dppo", "objective.clip_low=0.05", "objective.clip_high=0.05"),
            0.8,
            1.2,
            False,
        ),
        (("objective.name=rloo",), 0.8, 1.2, True),
        (("objective.name=gpg",), 0.8, 1.2, False),
    ],
)
def test_the_clip_range_is_the_objectives(
    settings: tuple[str, ...], low: float, high: float, per_completion: bool
) -> None:
    clip = clip_range(parts_of(*settings))
    assert (clip.low, clip.high) == (pytest.approx(low), pytest.approx(high))
    assert clip.per_completion is per_completion


@pytest.mark.parametrize(("mini", "epochs", "expected"), [(1, 1, 1), (4, 1, 3), (2, 3, 5)])
def test_default_updates_reach_the_last_step_of_a_batch(
    mini: int, epochs: int, expected: int
) -> None:
    config = load_config(None, [f"train.mini_batches={mini}", f"train.epochs={epochs}"])
    assert default_updates(config) == expected


def test_alone_means_one_row_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of()
    batch, sizes = collate(groups_of(parts)), []

    def spy(policy: object, rows: Batch) -> LogProbs:
        sizes.append(len(rows))
        return LogProbs(logp=rows.sampler_logp, entropy=rows.sampler_logp)

    monkeypatch.setattr(type(parts.policy), "plain_logp", spy)
    assert torch.equal(alone_logp(parts.policy, batch), batch.sampler_logp)
    assert sizes == [1] * 8


def test_without_truncation_all_mass_is_kept() -> None:
    parts = parts_of("rollout.max_tokens=4")
    batch = collate(groups_of(parts))
    kept = log_kept(parts.policy, batch, parts.sampling.distribution, 1000)
    assert not kept.any()
    # A distribution that cuts nothing in effect: all mass stays, but for rounding.
    wide = replace(parts.sampling.distribution, top_k=10_000)
    assert log_kept(parts.policy, batch, wide, 1000).abs().max() < 1e-6


def test_a_common_prefix_ends_where_tokens_part() -> None:
    one = group((1, 2, 3), (4,), (7, 8))
    other = group((1, 2, 9, 9), (5,), (7, 8, 9))
    batch = collate([one])
    expected = [[True, True, False], [False] * 3, [True, True, False]]
    assert common_prefix([one], [other], batch).tolist() == expected


def group(*answers: tuple[int, ...]) -> Group:
    rollouts = tuple(
        Rollout.single_turn(
            prompt_id="p", sample=n, prompt_tokens=(1,), tokens=tokens,
            trained=(True,) * len(tokens), sampler_logp=(0.0,) * len(tokens), text="",
            finish="stop", policy_version=0,
        )
        for n, tokens in enumerate(answers)
    )  # fmt: skip
    return Group(prompt=Prompt(id="p", task="t", messages=(), target=""), rollouts=rollouts)


def test_staleness_after_the_end_of_a_schedule_uses_its_peak() -> None:
    settings = ("optimizer.schedule=linear", "train.steps=1")
    early, over = parts_of(*settings), parts_of(*settings)
    over.policy.version = over.config.train.total_optimizer_steps
    assert over.settings.learning_rate(over.policy.version, over.used) == 0
    reports = [measure(parts, Notes(), updates=1, alone=2) for parts in (early, over)]
    before, after = (lines(report)["staleness"] for report in reports)
    assert after.mean == before.mean > 0  # the first step's rate is the peak
    assert [any("used its peak, 0.0001" in n for n in r.notes) for r in reports] == [False, True]
    still = report_of("optimizer.learning_rate=0")
    assert lines(still)["staleness"].max == 0
    assert not any("peak" in note for note in still.notes)


def test_a_token_budget_sets_the_position_in_the_schedule() -> None:
    settings = (
        "optimizer.schedule=linear", "train.steps=10", "train.stop_after={tokens=100000}", "train.mini_batches=1",
    )  # fmt: skip
    reports = []
    # As many updates as the schedule nominally has, and a tenth of the tokens.
    for rate, tokens in ("1e-4", 10_000), ("9e-5", 0):
        parts = parts_of(*settings, f"optimizer.learning_rate={rate}")
        parts.policy.version = 10
        parts.step, parts.tokens = 10, tokens
        reports.append(measure(parts, Notes(), updates=1, alone=2))
    tenth, whole = (lines(report)["staleness"] for report in reports)
    assert whole.mean > 0
    assert tenth.mean == pytest.approx(whole.mean, rel=1e-6)
    assert not any(report.notes for report in reports)
