"""A process of a test's own, which may be killed, without importing everything again."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


def forked(work: Callable[[], int], output: Path) -> int:
    """Do `work` in a child that writes to a file, and return its process id.

    Signals mean in it what they mean in a process that was started from a terminal.
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
