"""A persistent sandbox for scorers that evaluate text and are slow to import.

`run_program` starts a sandbox for each program. The sandbox in this module stays open for further
texts, and imports the scorer only once. A forked child process scores each text (see `server.py`).
A fork takes only milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import marshal
import math
import os
import pickle
import select
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from covey.errors import RewardError
from covey.sandbox import isolation, server
from covey.sandbox.limits import Limits
from covey.sandbox.program import _FLAGS, _end, _filter_file

LIMITS = Limits(
    cpu_seconds=4, wall_seconds=8.0, memory_bytes=2 << 30, processes=2, file_bytes=1 << 20
)
"""Resource limits for scoring one text. The limit on CPU time is lower than the limit on wall time,
so that the machine's load does not change scores."""
LONGEST = LIMITS.wall_seconds + 1.0
"""Maximum seconds to score one text."""
_START_SECONDS = 60.0
_HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variables that make Python use glibc's memory allocator, and make this allocator
request huge pages (2 MiB). Huge pages make a fork faster, because the page table to copy is
smaller. These environment variables have no effect on a machine without huge pages."""
_ABOUT_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage"
"""The folder that glibc reads before it requests huge pages."""
_BOOTSTRAP = """
import marshal, sys
with open(0, 'rb', buffering=0, closefd=False) as file:
    def read(size):
        data = b''
        while len(data) < size:
            data += file.read(size - len(data)) or sys.exit('the client is gone')
        return data
    modules, job = marshal.loads(read(int.from_bytes(read(4), 'big')))
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
sys.modules['covey.sandbox.server'].main(job)
"""
_OWN_MODULES = ("covey.sandbox.harness", "covey.sandbox.server")


class _GoneError(Exception):
    """Raised if the sandbox has ended."""


@dataclass(slots=True)
class Sandboxed:
    """A scoring function in its own sandbox. The first call of `score` starts the sandbox.

    The last module in `modules` defines three functions:

    - `load()` imports slow packages.
    - `prepare(trusted)` turns the trusted part of a request into the argument `prepared` of
      `score`.
    - `score(prepared, text)` returns a number from 0 to 1. Only `score` reads the untrusted text,
      and `score` runs in a separate process.

    The sandbox hides the package covey, so the source of `modules` is sent into the sandbox. Each
    module may import installed packages and the modules before it in `modules`.
    """

    modules: tuple[str, ...]
    unsafe: bool = False
    """Whether to run without isolation, as an ordinary process of this user."""
    limits: Limits = LIMITS

    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _owner: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def score(self, trusted: Any, text: str) -> float | None:
        """Return the score of a text, or None if scoring exceeded a limit or crashed.

        Raises RewardError if the sandbox cannot start, or if `prepare` fails.
        """
        request = pickle.dumps((trusted, text))
        with self._lock:
            for _ in range(2):  # the sandbox may have ended while idle: try once more
                try:
                    line = self._ask(request)
                except _GoneError:
                    self.close()
                    continue
                return _read(line)
        return None

    def close(self) -> None:
        """End the sandbox. The next call of `score` starts a new sandbox."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return  # the sandbox belongs to a parent process
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        _end(process)

    def _ask(self, request: bytes) -> bytes:
        process = self._started()
        assert process.stdin
        try:
            process.stdin.write(len(request).to_bytes(4, "big") + request)
            process.stdin.flush()
        except OSError:
            raise _GoneError from None
        line = _line(process, self.limits.wall_seconds + 1.0)
        if not line:
            self.close()
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        process = self._start()
        self._process, self._owner = process, os.getpid()
        try:
            ready = _line(process, _START_SECONDS) == server.READY
        except _GoneError:
            ready = False
        if not ready:
            reason = _complaint(process) or "no reason was given"
            self.close()
            raise RewardError(f"sandbox: the sandbox did not start: {reason}")
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        job = {
            **asdict(self.limits),
            "module": self.modules[-1],
            "paths": isolation.package_folders() if self.unsafe else isolation.package_places(),
            "isolated": not self.unsafe,
            "place": isolation.PLACE,
            "uid": None if self.unsafe else isolation.own_uid(),
        }
        first = marshal.dumps(
            ([(name, _code(name)) for name in (*_OWN_MODULES, *self.modules)], job)
        )
        with contextlib.ExitStack() as stack:
            prefix: list[str] = []
            passed: tuple[int, ...] = ()
            if not self.unsafe:
                passed = (stack.enter_context(_filter_file()),)
                prefix = isolation.command(self.limits.file_bytes)
                prefix[1:1] = ["--seccomp", str(passed[0])]
                prefix[3:3] = ["--ro-bind-try", _ABOUT_HUGE_PAGES, _ABOUT_HUGE_PAGES]
                for name, value in _HUGE_PAGES.items():
                    prefix += ["--setenv", name, value]
            process = subprocess.Popen(
                [*prefix, isolation.interpreter(), *_FLAGS, "-c", _BOOTSTRAP, "covey-scorer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**isolation.ENVIRONMENT, **_HUGE_PAGES} if self.unsafe else {},
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
            )
        assert process.stdin
        with contextlib.suppress(OSError):  # reading the reply detects an ended sandbox
            process.stdin.write(len(first).to_bytes(4, "big") + first)
            process.stdin.flush()
        return process


@cache
def sandboxed(*modules: str, unsafe: bool = False) -> Sandboxed:
    """Return this process's sandbox for the given modules."""
    made = Sandboxed(modules=modules, unsafe=unsafe)
    atexit.register(made.close)
    return made


@cache
def _code(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    assert spec
    assert spec.loader
    return spec.loader.get_code(name)  # type: ignore[attr-defined]


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the next line that the sandbox writes, or empty bytes after a timeout.

    Raises _GoneError if the sandbox has ended.
    """
    assert process.stdout
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            return b""
        data = os.read(process.stdout.fileno(), 1 << 12)
        if not data:
            raise _GoneError
        line += data
    return line


def _read(line: bytes) -> float | None:
    if line.startswith(server.FAILED):
        raise RewardError(f"reward: {line[len(server.FAILED) :].decode(errors='replace').strip()}")
    if not line or line == server.NO_SCORE:
        return None
    score = float(line)
    return score if math.isfinite(score) and 0 <= score <= 1 else None


def _complaint(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr
    process.kill()
    return process.stderr.read(1 << 16).decode(errors="replace").strip().rpartition("\n")[2]
