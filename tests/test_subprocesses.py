"""A process that ends with its parent, for vLLM servers and for trainer ranks in Ray actors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import pathlib, sys, time
from functools import partial
from covey.subprocesses import end_with_parent
end_with_parent(int(sys.argv[1]), partial(pathlib.Path(sys.argv[2]).write_text, "cleaned up"))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
words = [sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]]
child = subprocess.Popen(words, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_its_parent_and_cleans_up(tmp_path: Path) -> None:
    file = tmp_path / "file"
    words = [sys.executable, "-c", PARENT, CHILD, str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        time.sleep(1)
        assert not file.exists()
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == ""  # the child has closed the pipe, too
    assert file.read_text() == "cleaned up"
    # Its parent is gone, so init reaps it. The pipe closes a moment before the process has ended.
    until = time.monotonic() + 10
    while not ended(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert ended(child)


def ended(process: int) -> bool:
    """Tell whether a process is gone, or only waits to be reaped."""
    try:
        return "Z (zombie)" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
