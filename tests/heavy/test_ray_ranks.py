"""Trainer ranks that Ray starts, on a CPU. Run it with `make test-heavy`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: make test-heavy")

from tests.heavy.runs import Run

pytestmark = pytest.mark.slow

RANKS = 2
SMALL: dict[str, Any] = {
    "train__steps": 6, "rollout__prompts_per_step": 4, "rollout__group_size": 4,
    "rollout__max_tokens": 24, "train__micro_batch_tokens": 300, "train__mini_batches": 2,
    "evaluate__every": 0, "save__every": 1, "model__device": "cpu",
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "cluster__trainers": RANKS, "cluster__trainer_cpus": 0.25, "cluster__engine_cpus": 0.25,
}  # fmt: skip


def numbers(run: Run) -> list[dict[str, Any]]:
    """The metrics of each step, without times, and without those of engines that can restart."""
    left_out = ("time/", "engine/")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in run.steps()]


def weights(run: Run) -> bytes:
    return (run.folder / "checkpoints" / "000006" / "model.safetensors").read_bytes()


def ran_by_torchrun(folder: Path, **settings: Any) -> Run:
    """A run whose ranks torchrun starts, with the engine in each rank."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "-m", "--", "covey"]
    run = Run(folder / "run", launcher=launcher, **SMALL, **settings)
    assert run.end() == 0, run.text()
    return run


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ran_by_torchrun(tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ran_by_torchrun(tmp_path_factory.mktemp("fsdp"), parallel__strategy="fsdp")


# Ranks that replicate the model and generate themselves: the resumed run of the next test.
@pytest.mark.parametrize(
    ("wanted", "strategy", "engines"),
    [("torchrun", "ddp", 1), ("sharded", "fsdp", 0), ("sharded", "fsdp", 1)],
)
def test_ranks_in_actors_are_those_of_torchrun(
    wanted: str, strategy: str, engines: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    expected: Run = request.getfixturevalue(wanted)
    settings = {**SMALL, **CLUSTER, "cluster__engines": engines, "parallel__strategy": strategy}
    run = Run(tmp_path / "run", "--ray", "local", **settings)
    assert run.end() == 0, run.text()
    assert numbers(run) == numbers(expected)
    assert weights(run) == weights(expected)
    state = run.folder / "checkpoints" / "000006" / "state" / ".metadata"
    assert state.is_file() == (strategy == "fsdp"), "sharded ranks save their shards"
    assert run.text().count("step 6/6") == 1, "one rank talks"


@pytest.mark.parametrize("word", ["rank_process", "ray::RankActor"])
def test_a_killed_rank_ends_all_and_the_run_resumes(
    word: str, torchrun: Run, tmp_path: Path
) -> None:
    settings = {**SMALL, **CLUSTER, "cluster__engines": 0}
    run = Run(tmp_path / "run", "--ray", "local", **settings)
    run.wait_for_step(2)
    run.kill(word)
    assert run.end() == 1, run.text()
    assert run.text().count("is gone") == 1, run.text()
    assert "--resume continues" in run.text()
    assert run.processes("rank_process") == [], "the other ranks end"
    command = [sys.executable, "-m", "covey", "train", "--resume", str(run.folder)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    assert numbers(run) == numbers(torchrun)
    assert weights(run) == weights(torchrun)


def test_a_signal_saves_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SMALL, **CLUSTER, "cluster__engines": 0, "train__steps": 500, "save__every": 0}
    run = Run(tmp_path / "run", "--ray", "local", **settings)
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [
        f"{len(run.steps()):06d}"
    ]
