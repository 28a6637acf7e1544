"""Processes of a test's own, and waiting for what others do."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

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
