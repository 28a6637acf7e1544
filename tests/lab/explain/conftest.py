from __future__ import annotations

from pathlib import Path

import pytest

from covey.cli.main import run
from covey.records.folder import RunFolder

SETTINGS = (
    "train.steps=3", "train.mini_batches=2", "rollout.prompts_per_step=4", "rollout.group_size=8",
    "rollout.max_tokens=40", "optimizer.learning_rate=3e-4", "optimizer.schedule=linear",
    "objective.beta=0.04", "objective.clip_low=0.03", "objective.clip_high=0.03",
    "task.max_operations=3", "evaluate.every=0", "save.every=1",
    "save.keep=9",
)  # fmt: skip


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A short run with every checkpoint. Tests must not change it."""
    path = tmp_path_factory.mktemp("runs") / "grpo"
    overrides = [word for setting in SETTINGS for word in ("--set", setting)]
    assert run(["train", "arithmetic", "--run", str(path), *overrides]) == 0
    return RunFolder.open(path)


@pytest.fixture
def run_path(recorded_run: RunFolder) -> Path:
    return recorded_run.path
