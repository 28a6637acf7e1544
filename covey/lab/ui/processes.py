"""Runs slow work, and work that needs torch, in separate processes of the web server.

The web server starts these commands:

    covey runs check RUN --json              health of a run
    covey explain RUN --step N --json        every token of a step, trained again
    python -m covey.lab.explain.effect       the step explorer, kept open
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from covey.errors import CoveyError

PYTHON = (sys.executable, "-P", "-m")
"""The first words of a command that runs a Python module. The option -P keeps Python from importing
modules of the current folder."""
TIME_LIMIT = 900.0
KEPT = 32
"""Number of finished jobs whose results stay in memory."""
EXPLORER = "covey.lab.explain.effect"


class ProcessError(CoveyError):
    """Raised if a process that the web server started fails or takes too long."""


def covey_json(*arguments: str) -> Any:
    command = [*PYTHON, "covey", *arguments, "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"covey {arguments[0]} took longer than {TIME_LIMIT:.0f} s") from None
    try:
        return json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ProcessError(said[-1].removeprefix("covey: ")) from None


@dataclass(slots=True)
class Jobs:
    """Background jobs, which run one at a time and store their results under the job's key."""

    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _found: dict[tuple[str, ...], Future[Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, key: tuple[str, ...], work: Callable[[], Any]) -> None:
        """Queue a job if no job with the same key is queued, running or done."""
        with self._lock:
            if key not in self._found:
                self._found[key] = self._pool.submit(work)
            for old in [k for k, future in self._found.items() if future.done()][:-KEPT]:
                del self._found[old]

    def status(self, key: tuple[str, ...]) -> dict[str, Any]:
        """Return the `state` of a job (none, running, failed, done) and its `error` or `result`."""
        with self._lock:
            future = self._found.get(key)
        if future is None:
            return {"state": "none"}
        if not future.done():
            return {"state": "running"}
        error = future.exception()
        if error is None:
            return {"state": "done", "result": future.result()}
        with self._lock:
            self._found.pop(key, None)  # so that the job can be started again
        return {"state": "failed", "error": str(error)}

    def close(self) -> None:
        """Cancel the jobs that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Explorer:
    """The process behind the page's step explorer, started at the first request."""

    command: Sequence[str] = (*PYTHON, EXPLORER)
    _closed: bool = False
    _process: subprocess.Popen[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the process and return the response; raise ProcessError on failure."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            if not line:
                self._end()
                raise ProcessError(
                    "the process of the step explorer ended; the next request starts another"
                )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProcessError(answer["error"])
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._closed:
            raise ProcessError("the server is closing")
        if self._process is None:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._process

    def close(self) -> None:
        """End the process, so that later requests raise ProcessError."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # a thread that waits for an answer gets an error
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
