"""Run each untrusted program in its own sandbox, and each test case in its own process."""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any

from covey.errors import ConfigError, RewardError
from covey.sandbox import cgroup, harness, isolation, uids
from covey.sandbox.limits import Case, Limits, Outcome
from covey.sandbox.seccomp import filter_program

_BOOTSTRAP = (
    "import marshal, os\n"
    "def read(size):\n"
    "    data = b''\n"
    "    while len(data) < size: data += os.read(0, size - len(data))\n"
    "    return data\n"
    "def take(): return marshal.loads(read(int.from_bytes(read(8), 'little')))\n"
    "code, job = take()\n"
    "names = {'__name__': 'harness'}\n"
    "exec(code, names)\n"
    "names['main'](job, take)"
)
_FLAGS = ("-S", "-s", "-P", "-B")
"""Command-line options for the Python interpreter in the sandbox. The option -I is not used,
because it makes Python ignore PYTHONHASHSEED, which fixes the order of sets."""
_START_SECONDS = 20.0
"""Time limit for starting a sandbox, which can take seconds on a busy machine."""
_GRACE_SECONDS = 0.5
"""Covey kills the harness if the harness is still running this many seconds after the time
limit."""
_HEADER = re.compile(
    rb"([0-3]) (-?\d{1,9}) (\d{1,9}(?:\.\d{1,9})?) (\d{1,15}) (\d{1,15}) (\d{1,15})\n"
)


def run_program(
    program: str, cases: Sequence[Case], *, limits: Limits | None = None, unsafe: bool = False
) -> list[Outcome]:
    """Run a Python program once per test case, and return the outcome of each test case.

    With `unsafe`, the program runs without a sandbox and has all rights of the current user.
    Without a sandbox, no limit applies to the number of processes, or to the memory and files of
    all processes together. Raises RewardError if the sandbox itself cannot start.
    """
    limits = limits or Limits()
    job = {
        **asdict(limits),
        "program": program,
        "cases": len(cases),
        "paths": isolation.package_folders() if unsafe else isolation.package_places(),
        "isolated": not unsafe,
        "socket_bytes": 0 if unsafe else isolation.socket_bytes(),
    }
    inputs = [{"stdin": c.stdin.encode(errors="surrogatepass"), "call": c.call} for c in cases]
    with _started(job, inputs, limits, unsafe) as process:
        most = len(cases) * (3 * limits.output_bytes + 100)
        reply, errors = _receive(process, limits.total_seconds + _GRACE_SECONDS, most)
    if not reply.startswith(harness.READY):
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        reason = reason or "no reason was given"
        raise RewardError(f"sandbox: the sandbox did not start: {reason}")
    return _read_reports(reply[len(harness.READY) :], len(cases))


def mark() -> str:
    """Return a label that marks the sandboxes of this process in their command lines."""
    return f"covey-sandbox-of-{os.getpid()}"


def require_isolation() -> None:
    """Raise ConfigError if this machine cannot isolate programs."""
    reason = isolation_problem()
    if reason:
        raise ConfigError(
            f"sandbox: programs cannot be isolated on this machine: {reason}; install bubblewrap "
            "0.7 or newer (apt install bubblewrap) and allow user namespaces, or set "
            "unsafe = true to run programs without protection"
        )


@cache
def isolation_problem() -> str:
    """Return why this machine cannot isolate programs, or "" if it can isolate programs."""
    if not sys.platform.startswith("linux"):
        return f"this is {sys.platform}, not Linux"
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    if filter_program() is None:
        return "its architecture has no table of system calls"
    try:
        outcome = run_program("", [Case(call="6 * 7")])[0]
    except (RewardError, OSError) as error:
        return str(error)
    return "" if outcome.value == b"42" else f"a test program {outcome.ended}"


@cache
def _harness_code() -> Any:
    return compile(Path(harness.__file__).read_bytes(), "<harness>", "exec")


@contextlib.contextmanager
def _started(
    job: dict[str, Any], inputs: Sequence[Any], limits: Limits, unsafe: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the harness, and send it the program and the cases to run.

    When the `with` block ends, the harness and all its child processes are killed.
    """
    with contextlib.ExitStack() as stack:
        place = isolation.PLACE
        prefix: list[str] = []
        passed: tuple[int, ...] = ()
        uid = None
        if unsafe:
            place = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        else:
            passed = (stack.enter_context(_filter_file()),)
            prefix = isolation.command(limits.file_bytes)
            prefix[1:1] = ["--seccomp", str(passed[0])]
            group = stack.enter_context(cgroup.group(limits, cgroup.parent_here()))
            prefix = [*isolation.entering(group), *prefix]
            uid = stack.enter_context(uids.leased())
        stdin = stack.enter_context(tempfile.TemporaryFile())
        for part in ((_harness_code(), {**job, "place": place, "uid": uid}), *inputs):
            data = marshal.dumps(part)
            stdin.write(len(data).to_bytes(8, "little") + data)
        stdin.seek(0)
        process = subprocess.Popen(
            [*prefix, isolation.interpreter(), *_FLAGS, "-c", _BOOTSTRAP, mark()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**isolation.ENVIRONMENT, "HOME": place} if unsafe else {},
            cwd=place if unsafe else "/",
            pass_fds=passed,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


@contextlib.contextmanager
def _filter_file() -> Iterator[int]:
    """Yield a file descriptor from which bubblewrap reads the seccomp filter."""
    reads, writes = os.pipe()
    try:
        os.write(writes, filter_program() or b"")
        os.close(writes)
        yield reads
    finally:
        os.close(reads)


def _receive(process: subprocess.Popen[bytes], seconds: float, most: int) -> tuple[bytes, bytes]:
    """Read stdout and stderr of the harness for `seconds` seconds, and at most `most` bytes of
    each."""
    assert process.stdout
    assert process.stderr
    received: dict[IO[bytes], bytearray] = {
        process.stdout: bytearray(),
        process.stderr: bytearray(),
    }
    deadline = time.monotonic() + _START_SECONDS
    ready = False
    with selectors.DefaultSelector() as selector:
        for file in received:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                buffer = received[key.fileobj]  # type: ignore[index]
                buffer += data
                if not data or len(buffer) > most + len(harness.READY):
                    selector.unregister(key.fileobj)
            if not ready and received[process.stdout].startswith(harness.READY):
                ready = True
                deadline = time.monotonic() + seconds
    return bytes(received[process.stdout]), bytes(received[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox. All processes of a sandbox die when its first process dies."""
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()  # makes a harness that is still alive exit
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_reports(data: bytes, cases: int) -> list[Outcome]:
    """Parse the reports of the harness into the outcomes of the test cases.

    Test cases without a report were killed together with the harness.
    """
    outcomes: list[Outcome] = []
    at = 0
    while len(outcomes) < cases and (header := _HEADER.match(data, at)):
        ended, code, seconds, *sizes = header.groups()
        at = header.end()
        outputs = []
        for size in sizes:
            outputs.append(data[at : at + int(size)])
            at += int(size)
        if at > len(data):
            break
        outcome = Outcome(
            ended=harness.ENDED[int(ended)],  # type: ignore[arg-type]
            exit_code=int(code),
            seconds=float(seconds),
            stdout=outputs[0],
            stderr=outputs[1],
            value=outputs[2],
        )
        outcomes.append(outcome)
    return outcomes + [Outcome(ended="killed")] * (cases - len(outcomes))
