"""On-policy distillation with one completion per prompt, and the memory of its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.api import train
from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.lab.plan.forecast import Device
from covey.lab.plan.memory import forecast

DISTIL = ["objective.name=opd", "teacher.path=embedded", "rollout.group_size=1"]


def test_a_teacher_needs_no_group(tmp_path: Path) -> None:
    result = train(
        "demo", run=tmp_path / "run", quiet=True,
        **{"objective": {"name": "opd"}, "teacher.path": "embedded", "rollout.group_size": 1,
           "rollout.prompts_per_step": 4, "train.steps": 2, "evaluate.every": 0,
           "train.mini_batches": 1},
    )  # fmt: skip
    assert [row["rollout/trained_groups"] for row in result.metrics] == [4, 4]
    # At the first step the teacher is the policy itself: nothing pulls.
    assert result.metrics[0]["optim/grad_norm"] < 1e-3


def test_objectives_that_compare_refuse_a_group_of_one() -> None:
    for more in (["objective.name=grpo"], [*DISTIL, "objective.task=1"]):
        with pytest.raises(ConfigError, match=r"rollout\.group_size = 1"):
            resolve(load_config("demo", ["rollout.group_size=1", *more]))
    resolve(load_config("demo", DISTIL))


def test_the_plan_counts_the_weights_of_a_teacher() -> None:
    device = Device(kind="cpu", memory=2**33, name="test")
    parts = {p.name: p.bytes for p in forecast(resolve(load_config("demo", DISTIL)), device).parts}
    assert parts["teacher"] == parts["weights"] > 0
    plain = {p.name for p in forecast(resolve(load_config("demo")), device).parts}
    assert "teacher" not in plain
