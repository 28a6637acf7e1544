from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from covey.cli.main import run as command
from covey.embedded import MODELS
from covey.errors import RunError
from covey.lab.explain.explained_step import explain_step
from covey.lab.explain.recorded import policy_before, read_step
from covey.records.folder import RunFolder


def without_checkpoints(run: RunFolder, path: Path, *, keep: tuple[int, ...] = ()) -> RunFolder:
    shutil.copytree(run.path, path)
    copy = RunFolder.open(path)
    for step, folder in copy.checkpoints():
        if step not in keep:
            shutil.rmtree(folder)
    return copy


@pytest.mark.parametrize("step", [1, 2, 3])
def test_training_a_step_again_gives_the_logged_metrics(recorded_run: RunFolder, step: int) -> None:
    recorded = read_step(recorded_run, step)
    explained = explain_step(policy_before(recorded_run, step), recorded)
    assert explained.origin.exact
    assert explained.origin.checkpoint == step - 1
    assert {"loss/policy_avg", "optim/grad_norm", "objective/kl_avg"} <= explained.logged.keys()
    for name, value in explained.logged.items():
        assert explained.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert len(explained.rollouts) == 32
    for rollout in explained.rollouts:
        assert rollout.advantage == pytest.approx(rollout.recorded_advantage, abs=1e-9)


ELABORATE = (
    "adapter.rank=4", "train.mini_batches=2", "train.epochs=2", "train.steps=2",
    "train.stop_after={tokens=400}", "rollout.prompts_per_step=3", "rollout.group_size=4",
    "objective.name=rloo", "objective.entropy_bonus=0.01", "optimizer.learning_rate=1e-3",
    "filter.mask_truncated=true", "evaluate.every=0", "save.every=1",
)  # fmt: skip


def test_logged_metrics_with_an_adapter_epochs_entropy_and_a_token_budget(tmp_path: Path) -> None:
    overrides = [word for setting in ELABORATE for word in ("--set", setting)]
    assert command(["train", "arithmetic", "--run", str(tmp_path / "run"), *overrides]) == 0
    run = RunFolder.open(tmp_path / "run")
    explained = explain_step(policy_before(run, 2), read_step(run, 2))
    assert explained.updates == 4
    assert {a.update for a in explained.rollouts} == {3, 4}  # in the last epoch
    assert {"lr", "loss/policy_avg", "optim/grad_norm"} <= explained.logged.keys()
    for name, value in explained.logged.items():
        assert explained.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_training_the_steps_since_a_checkpoint_again_ends_in_the_same_weights(
    recorded_run: RunFolder, tmp_path: Path
) -> None:
    trainee = policy_before(without_checkpoints(recorded_run, tmp_path / "run"), 3, exact=True)
    assert (trainee.origin.checkpoint, trainee.origin.replayed_steps) == (0, 2)
    assert trainee.origin.exact
    there = load_file(recorded_run.path / "checkpoints/000002/model.safetensors")
    for name, parameter in trainee.run.policy.optimizer.masters.items():
        assert torch.equal(parameter, there[name]), name
    assert trainee.run.policy.version == 4


@pytest.mark.parametrize(
    ("declared", "resumed_with", "exact"),
    [(True, None, True), (False, None, False), (None, None, True), (True, False, False)],
    ids=["exact", "not exact", "of an earlier version", "resumed with another engine"],
)
def test_a_step_takes_old_logp_from_the_engine_if_the_run_recorded_that_it_is_exact(
    recorded_run: RunFolder, tmp_path: Path, declared: bool | None, resumed_with: bool | None,
    exact: bool,
) -> None:  # fmt: skip
    run = RunFolder.open(shutil.copytree(recorded_run.path, tmp_path / "run"))
    environment = run.environment()
    assert environment.pop("exact_logp") is True
    environment |= {} if declared is None else {"exact_logp": declared}
    (run.path / "environment.json").write_text(json.dumps(environment))
    if resumed_with is not None:
        change = {"step": 2, "settings": {}, "exact_logp": resumed_with}
        (run.path / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert policy_before(run, 1).run.settings.old_logp_from_sampler is exact


def test_older_weights_are_reported_and_ratios_start_at_one(
    recorded_run: RunFolder, tmp_path: Path
) -> None:
    run = without_checkpoints(recorded_run, tmp_path / "run", keep=(1, 3))
    explained = explain_step(policy_before(run, 3), read_step(run, 3))
    assert (explained.origin.checkpoint, explained.origin.steps_behind) == (1, 1)
    assert not explained.origin.exact
    # The recorded log-probs are those of other weights; the first optimizer step is on policy.
    assert explained.metrics["debug/sampler_logp_diff_mean"] > 1e-3
    first = [t for a in explained.rollouts if a.update == 1 for t in a.tokens]
    assert max(abs(t.ratio - 1) for t in first) < 1e-5
    assert max(abs(t.logp - t.sampler_logp) for t in first) > 1e-2


@pytest.fixture(scope="module")
def explained(recorded_run: RunFolder):
    return explain_step(policy_before(recorded_run, 2), read_step(recorded_run, 2))


def test_token_gradients_follow_the_formula_of_grpo(explained) -> None:
    beta, low, high = 0.04, 0.03, 0.03
    clipped = 0
    for rollout in explained.rollouts:
        for t in rollout.tokens:
            assert t.weight == pytest.approx(1 / (16 * len(rollout.tokens)))
            ratio, d = math.exp(t.logp - t.old_logp), t.logp - t.ref_logp
            assert t.ratio == pytest.approx(ratio, rel=1e-4)
            cut = t.ratio > 1 + high if t.advantage > 0 else t.advantage < 0 and t.ratio < 1 - low
            assert bool(t.clipped) == cut
            gain = 0.0 if cut else t.ratio * t.advantage
            slope = -t.weight * (gain - beta * (1 - math.exp(-d)))
            assert t.gradient == pytest.approx(slope, rel=1e-3, abs=1e-7)
            clipped += cut
    assert clipped == explained.clipped > 0
    assert {rollout.update for rollout in explained.rollouts} == {1, 2}


def test_rollouts_groups_and_the_step_add_up(explained) -> None:
    whole = sum(a.gradient for a in explained.rollouts)
    assert whole > 0
    for rollout in explained.rollouts:
        assert rollout.gradient == pytest.approx(sum(abs(t.gradient) for t in rollout.tokens))
        assert rollout.push == pytest.approx(-sum(t.gradient for t in rollout.tokens))
    assert sum(g.token_share for g in explained.groups) == pytest.approx(1)
    by_line = {a.line: a for a in explained.rollouts}
    for group in explained.groups:
        members = [by_line[line] for line in group.lines]
        assert group.token_share == pytest.approx(sum(a.gradient for a in members) / whole)
        assert group.zero_variance == (len({a.reward for a in members}) == 1)
    largest = sorted((a.gradient for a in explained.rollouts), reverse=True)
    assert (
        sum(largest[: explained.half_token_share_from])
        >= whole / 2
        > sum(largest[: explained.half_token_share_from - 1])
    )
    raised = -sum(min(0.0, t.gradient) for a in explained.rollouts for t in a.tokens)
    assert explained.token_share_raised == pytest.approx(raised / whole)


def test_projections_are_those_of_float64_gradients_of_the_formula(recorded_run: RunFolder) -> None:
    """In the first optimizer step, all ratios are 1, and policy and reference are equal."""
    recorded = read_step(recorded_run, 1)
    explained = explain_step(policy_before(recorded_run, 1), recorded)
    model = AutoModelForCausalLM.from_pretrained(MODELS["embedded"], dtype=torch.float64).eval()
    rows = [row for row in explained.rollouts if row.update == 1]
    assert len(rows) == 16
    gradients = []
    for row in rows:
        rollout = recorded.rollouts[row.line - 1].rollout
        prompt, tokens = rollout.prompt_tokens, rollout.tokens
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])
        loss = -row.recorded_advantage * logp.mean() / len(rows)
        parts = torch.autograd.grad(loss, [*model.parameters()])
        gradients.append(torch.cat([part.flatten() for part in parts]))
    whole = torch.stack(gradients).sum(dim=0)
    for row, gradient in zip(rows, gradients, strict=True):
        expected = float(gradient @ whole / (whole @ whole)) / explained.updates
        assert row.projection == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert any(row.projection < 0 for row in rows)  # some work against the step
    for update in (1, 2):
        parts = [row.projection for row in explained.rollouts if row.update == update]
        assert sum(parts) == pytest.approx(1 / 2, abs=1e-5)
    assert sum(group.projection for group in explained.groups) == pytest.approx(1, abs=1e-5)


def test_projections_change_nothing_and_end_in_time(recorded_run: RunFolder) -> None:
    recorded = read_step(recorded_run, 2)
    told: list[str] = []
    long = explain_step(policy_before(recorded_run, 2), recorded, 1000.0, told.append)
    assert len(told) == 32
    without = explain_step(policy_before(recorded_run, 2), recorded, 0.0)
    assert without.metrics == long.metrics
    assert {row.projection for row in without.rollouts} == {None}
    assert without.half_gradient_from is None
    short = explain_step(policy_before(recorded_run, 2), recorded, 1e-6)
    assert short.half_gradient_from is None
    assert short.metrics == long.metrics


def test_the_projections_of_a_step_with_epochs_and_an_adapter_add_up(tmp_path: Path) -> None:
    overrides = [word for setting in ELABORATE for word in ("--set", setting)]
    assert command(["train", "arithmetic", "--run", str(tmp_path / "run"), *overrides]) == 0
    run = RunFolder.open(tmp_path / "run")
    explained = explain_step(policy_before(run, 2), read_step(run, 2))
    assert sum(row.projection for row in explained.rollouts) == pytest.approx(1, abs=1e-4)


def test_groups_are_separated_and_filtered_ones_are_not_trained(
    recorded_run: RunFolder, tmp_path: Path
) -> None:
    run = without_checkpoints(recorded_run, tmp_path / "run")
    file = run.path / "rollouts/000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[8:16]:  # the same prompt twice, one after the other
        row["prompt_id"] = rows[0]["prompt_id"]
    for row in rows[16:24]:
        row["advantage"] = None
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = read_step(run, 1)
    assert [len(group.rollouts) for group in recorded.groups] == [8, 8, 8]
    assert [a.group for a in recorded.rollouts[::8]] == [1, 2, 3, 4]
    explained = explain_step(policy_before(run, 1), recorded)
    assert explained.filtered_out == 8
    assert [g.group for g in explained.groups] == [1, 2, 4]
    assert [a.line for a in explained.rollouts] == [*range(1, 17), *range(25, 33)]


def test_missing_and_empty_steps_are_errors(recorded_run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="no completions of step 7; it has completions of steps 1 to 3"
    ):
        read_step(recorded_run, 7)
    run = without_checkpoints(recorded_run, tmp_path / "run")
    file = run.path / "rollouts/000001.jsonl"
    rows = [json.loads(line) | {"advantage": None} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunError, match="step 1 did not train on any rollout"):
        explain_step(policy_before(run, 1), read_step(run, 1))
