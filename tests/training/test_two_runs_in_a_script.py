"""A script that several ranks run may train more than once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.records.folder import RunFolder
from tests.parallel.ranks import codes_of, start_ranks
from tests.processes import PATIENCE

SCRIPT = """
import covey

for seed in (0, 1, 2):
    result = covey.train(
        "arithmetic", run=f"{folder}/{seed}", quiet=True,
        **{"seed": seed, "model.device": "cpu", "train.steps": 1, "rollout.prompts_per_step": 2,
           "rollout.group_size": 2, "rollout.max_tokens": 6, "train.mini_batches": 1,
           "evaluate.every": 0, "parallel.strategy": strategy, "parallel.timeout": 60.0},
    )
    assert result.step == 1
"""


def check(folder: Path) -> None:
    assert [len(RunFolder.open(folder / seed).steps()) for seed in "012"] == [1, 1, 1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_three_times(strategy: str, tmp_path: Path) -> None:
    """Rank 0 serves the store, as without torchrun."""

    def work(rank: int) -> int:
        exec(SCRIPT, {"folder": tmp_path, "strategy": strategy})
        return 0

    logs = tmp_path / "logs"
    codes = codes_of(start_ranks(2, work, logs))
    assert codes == [0, 0], "".join(log.read_text() for log in logs.iterdir())
    check(tmp_path)


def test_a_script_of_torchrun_trains_three_times(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"folder, strategy = {str(tmp_path)!r}, 'ddp'\n{SCRIPT}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path)
