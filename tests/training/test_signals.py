"""Signals of a terminal and of a batch system, sent to real commands."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path

import pytest

from covey.records.folder import RunFolder
from tests.processes import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
SETTINGS = (
    "model.device=cpu", "train.steps=5000", "train.mini_batches=1", "save.every=0", "evaluate.every=0",
    "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=6",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(run: Path) -> list[str]:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    return [sys.executable, "-m", "covey", "train", "arithmetic", "--run", str(run), *words]


def hear() -> None:
    """Undo that a shell or nohup makes its background processes ignore signals."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    def there() -> bool:
        assert process.poll() is None, process.returncode
        return (run / "steps.jsonl").exists() and len(RunFolder(run).steps()) >= steps

    wait_until(there)


def check_saved(run: Path) -> None:
    """The last step is in a checkpoint."""
    folder = RunFolder.open(run)
    assert [step for step, _ in folder.checkpoints()] == [len(folder.steps())]


@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGUSR1, signal.SIGUSR1]], ids=str)
def test_a_signal_that_announces_the_end_saves_the_run(
    numbers: Sequence[signal.Signals], tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    with output.open("w") as file:
        started = {
            "stdout": file,
            "stderr": subprocess.STDOUT,
            "env": ENVIRONMENT,
            "preexec_fn": hear,
        }
        process = subprocess.Popen(command(run), **started)
    wait_for_steps(run, 2, process)
    for number in numbers:
        process.send_signal(number)
    assert process.wait(PATIENCE) == 128 + numbers[0]
    check_saved(run)
    assert f"{numbers[0].name}: saved step" in output.read_text()


def test_closing_the_terminal_saves_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    controller, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        ioctl(0, termios.TIOCSCTTY, 0)
        hear()

    process = subprocess.Popen(
        command(run), stdin=terminal, stdout=terminal, stderr=terminal, env=ENVIRONMENT,
        preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(terminal)
    os.set_blocking(controller, False)

    def read_and_look() -> bool:
        try:
            while os.read(controller, 65536):
                pass
        except OSError:
            pass
        return (run / "steps.jsonl").exists() and len(RunFolder(run).steps()) >= 2

    wait_until(read_and_look)
    os.close(controller)
    assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    check_saved(run)


def test_nohup_still_means_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        ["nohup", *command(run)], stdin=nothing, stdout=nothing, stderr=nothing, env=ENVIRONMENT
    )
    wait_for_steps(run, 1, process)
    process.send_signal(signal.SIGHUP)
    wait_for_steps(run, len(RunFolder(run).steps()) + 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143
    check_saved(run)


@pytest.mark.parametrize("library", ["pydantic_core", "libtorch_cpu", "torch/lib/libtorch_python"])
def test_ctrl_c_during_imports_is_quiet(library: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        started = {
            "stdout": file,
            "stderr": subprocess.STDOUT,
            "env": ENVIRONMENT,
            "preexec_fn": hear,
        }
        process = subprocess.Popen(command(tmp_path / "run"), **started)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: library in maps.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert output.read_text() == ""
