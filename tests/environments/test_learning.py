"""The embedded calculator model learns to call its tool, and the run shows every turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.records.folder import RunFolder
from tests.environments import worlds

STEPS = 6
QUICK = (
    f"train.steps={STEPS}", f"evaluate.every={STEPS}", "evaluate.prompts=48", "save.every=0",
    "optimizer.schedule=constant", "model.device=cpu",
)  # fmt: skip


def test_a_few_steps_teach_to_call_the_calculator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    overrides = [word for setting in QUICK for word in ("--set", setting)]
    assert covey(["train", "agent-calculator", "--run", str(path), *overrides]) == 0
    run = RunFolder(path)
    before, after = (row["greedy"]["value"] for row in run.evaluations())
    assert before <= 0.2
    assert after >= 0.6
    last = run.steps()[-1]
    assert 1.5 < last["rollout/turns"] <= 3
    assert last["rollout/tool_calls"] > 0.5
    assert 1 <= last["rollout/segments"] < 1.2
    assert last["rollout/environment_errors"] == 0
    capsys.readouterr()
    assert covey(["runs", str(path), "--step", str(STEPS)]) == 0
    shown = capsys.readouterr().out
    assert "call calculator('" in shown
    assert "tool (8 tokens, not trained)" in shown


def test_python_trains_with_a_class_of_ones_own(tmp_path: Path) -> None:
    import covey as package

    result = package.train(
        "agent-calculator",
        environment=worlds.Paid,
        run=tmp_path / "run",
        quiet=True,
        **{
            "train.steps": 1, "evaluate.every": 0, "reward.name": "environment",
            "objective.name": "gigpo", "rollout.prompts_per_step": 2, "rollout.group_size": 4,
            "reward.success_at": 0.5, "environment.max_tokens": 256,
        },
    )  # fmt: skip
    (metrics,) = result.metrics
    rows = RunFolder(result.folder).rollouts(1)
    for row in rows:
        paid = [turn["reward"] or 0.0 for turn in row["turns"] if turn["role"] == "assistant"]
        assert row["reward"] == pytest.approx(sum(paid))
    assert metrics["rollout/turns"] > 1
