"""A run is a function of its configuration: repeated, stopped or killed, it comes out the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.policy import checkpoint
from covey.records import files, folder
from tests.processes import forked, wait_until

SETTINGS = (
    "model.device=cpu",  # a GPU adds up in any order
    "train.steps=6", "save.every=2", "save.keep=10", "evaluate.every=3", "evaluate.prompts=4",
    "rollout.prompts_per_step=3", "rollout.group_size=4", "train.mini_batches=2",
)  # fmt: skip


def arguments(path: Path, *more: str) -> list[str]:
    overrides = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return ["train", "--run", str(path), *overrides]


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def timeless(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def assert_same(run: Path, other: Path) -> None:
    assert timeless(run / "steps.jsonl") == timeless(other / "steps.jsonl")
    assert timeless(run / "eval.jsonl") == timeless(other / "eval.jsonl")
    for step in range(1, 7):
        name = f"rollouts/{step:06d}.jsonl"
        assert (run / name).read_text() == (other / name).read_text()
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(p / "checkpoints/000006" / file) for p in (run, other))
        assert a.keys() == b.keys()
        assert all((a[k] == b[k]).all() for k in a)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert covey(arguments(path)) == 0
    assert len(timeless(path / "steps.jsonl")) == 6
    return path


def test_the_same_seed_gives_the_same_run(uninterrupted: Path, tmp_path: Path) -> None:
    assert covey(arguments(tmp_path / "again")) == 0
    assert_same(tmp_path / "again", uninterrupted)


def test_another_seed_gives_another_run(uninterrupted: Path, tmp_path: Path) -> None:
    assert covey(arguments(tmp_path / "other", "seed=1", "train.steps=1")) == 0
    other = timeless(tmp_path / "other/steps.jsonl")[0]
    assert other != timeless(uninterrupted / "steps.jsonl")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resuming_goes_on_bit_for_bit(
    number: signal.Signals, uninterrupted: Path, tmp_path: Path
) -> None:
    path, output = tmp_path / "run", tmp_path / "output"
    child = forked(lambda: covey(arguments(path)), output)
    wait_until((path / "rollouts/000003.jsonl").exists)
    os.kill(child, number)
    code = wait(child)
    saved = max(int(p.name) for p in (path / "checkpoints").iterdir())
    assert saved >= 3
    assert code == (128 + number if saved < 6 else 0)
    if saved < 6:
        assert f"{number.name}: saved step {saved} of 6" in output.read_text()
        assert f"covey train --resume {path}" in output.read_text()
    assert covey(["train", "--resume", str(path)]) == 0
    assert_same(path, uninterrupted)


def dies_at_write(number: int, work: Callable[[], int]) -> Callable[[], int]:
    """Return the same work, which kills itself the hard way when it begins a write."""
    left = number

    def fatal(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapper

    def dying() -> int:
        folder.append_line = fatal(folder.append_line)
        folder.write_text = fatal(folder.write_text)
        checkpoint.save_file = fatal(checkpoint.save_file)
        files.sync = fatal(files.sync)
        return work()

    return dying


# The first six writes make environment.json and config.toml: before them there is no run.
@pytest.mark.parametrize("number", [7, 8, 9, 10, 11, 12, 13, 14, 16, 19, 24, 32, 44])
def test_kill_9_at_any_write_and_resuming_goes_on_bit_for_bit(
    number: int, uninterrupted: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    work = dies_at_write(number, lambda: covey(arguments(path)))
    assert wait(forked(work, tmp_path / "output")) == -signal.SIGKILL
    assert covey(["train", "--resume", str(path)]) == 0
    assert_same(path, uninterrupted)
    assert not list(path.rglob("*.partial"))


def test_a_compact_state_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "run"
    compact = (
        "optimizer.state=compact", "model.dtype=bfloat16", "optimizer.learning_rate=1e-4",
    )  # fmt: skip
    assert covey(arguments(whole, *compact)) == 0
    # Not forked: torch's threads for bfloat16 do not always outlive a fork.
    command = [sys.executable, "-m", "covey", *arguments(path, *compact)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here
    with subprocess.Popen(command, env=one_thread, stdout=subprocess.DEVNULL) as child:
        wait_until((path / "rollouts/000003.jsonl").exists)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert covey(["train", "--resume", str(path)]) == 0
    assert_same(path, whole)
    weights, moments = (
        load_file(whole / "checkpoints/000006" / f"{kind}.safetensors")
        for kind in ("model", "optimizer")
    )
    # The exact weights, which bfloat16 does not hold; and moments that it does.
    assert any((w != w.bfloat16()).any() for w in weights.values())
    kept = {str(m.dtype) for name, m in moments.items() if not name.startswith("step.")}
    assert kept == {"torch.bfloat16"}


def test_a_finished_run_resumes_to_nothing(uninterrupted: Path) -> None:
    before = (uninterrupted / "steps.jsonl").read_text()
    assert covey(["train", "--resume", str(uninterrupted)]) == 0
    assert (uninterrupted / "steps.jsonl").read_text() == before
