"""Processes of a test's own, and waiting for what others do."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covey.subprocesses import module_command

# On a busy machine anything can take long: this is when a test would hang, not how long things take.
PATIENCE = 120.0


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until something is true, which it must become."""
    limit = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody has asked about is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def forked(work: Callable[[], int], output: Path) -> int:
    """Do `work` in a child that writes to a file, and return its process id.

    Nothing is imported again, so it is there at once. Signals mean in it what they mean in a process that was started from a terminal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: there is only this one
        child = os.fork()
    if child == 0:
        code = 99
        try:
            with output.open("w", buffering=1) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout = sys.stderr = file
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = work()
                file.flush()
        finally:
            os._exit(code)
    return child


class Forked:
    """Work in a child of this process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, work: Callable[[], int], output: Path) -> None:
        self.returncode: int | None = None
        self.pid = forked(work, output)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self.poll(options=0)
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start(command: Sequence[str], output: Path = Path(os.devnull), **options: Any) -> Forked:
    """Run `python -m covey ...` in a fork of this process."""
    from covey.cli.main import run as covey

    assert list(command[:3]) == [sys.executable, "-m", "covey"]
    return Forked(lambda: covey(list(command[3:])), output)


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        code = _start(command, output).wait()
        assert code is not None
        return subprocess.CompletedProcess(command, code, output.read_text(), "")


FORKS = SimpleNamespace(run=_run, Popen=_start, DEVNULL=subprocess.DEVNULL)
"""What scripts use of `subprocess`. The commands of Covey that they start import nothing again."""


def _start_module(
    command: Sequence[str],
    *,
    stdin: int,
    pass_fds: Sequence[int],
    start_new_session: bool,
    env: Mapping[str, str] | None,
) -> Forked | subprocess.Popen[bytes]:
    """Run a command of `module_command` in a fork of this process."""
    *start, _ = module_command("")
    assert list(command[: len(start)]) == start
    module, *arguments = command[len(start) :]
    if module == "covey.models.template_worker":  # its limit on memory is below a fork's
        return subprocess.Popen(
            command, stdin=stdin, pass_fds=pass_fds, start_new_session=start_new_session, env=env
        )

    def work() -> int:
        if start_new_session:
            os.setsid()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for before, after in pairwise(sorted({0, 1, 2, *pass_fds, most})):
            os.closerange(before + 1, after)
        sys.argv = [module, *arguments]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the module has been imported before
                runpy.run_module(module, run_name="__main__")
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException:
            return 1
        return 0

    return Forked(work, Path(os.devnull))


FORKED_WORKERS = SimpleNamespace(
    Popen=_start_module, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
)
"""What `covey.subprocesses` uses of `subprocess`. Workers import nothing again."""
