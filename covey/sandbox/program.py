"""Running a program that nobody trusts: one sandbox a program, one process in it a case."""

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
    "import marshal\n"
    "with open(0, 'rb', closefd=False) as f: code, job = marshal.loads(f.read())\n"
    "names = {'__name__': 'harness'}\n"
    "exec(code, names)\n"
    "names['main'](job)"
)
_FLAGS = ("-S", "-s", "-P", "-B")
"""Not -I, which would ignore the environment, and so the seed of hashes: sets have an order."""
_START_SECONDS = 20.0
"""How long a sandbox may take to start. On a machine out of breath that can be seconds."""
_GRACE_SECONDS = 0.5
"""What the harness gets beyond its total time to end everything itself."""
_HEADER = re.compile(
    rb"([0-3]) (-?\d{1,9}) (\d{1,9}(?:\.\d{1,9})?) (\d{1,15}) (\d{1,15}) (\d{1,15})\n"
)


def run_program(
    program: str, cases: Sequence[Case], *, limits: Limits | None = None, unsafe: bool = False
) -> list[Outcome]:
    """Run a Python program once a case and tell how each ended.

    `unsafe` runs it as an ordinary process, which can read, write and reach whatever its user can:
    only the limits on time, and of each process by itself, hold.

    Raises RewardError where the sandbox itself could not be started.
    """
    limits = limits or Limits()
    job = {
        **asdict(limits),
        "program": program,
        "cases": [{"stdin": c.stdin.encode(errors="surrogatepass"), "call": c.call} for c in cases],
        "paths": isolation.package_folders() if unsafe else isolation.package_places(),
        "isolated": not unsafe,
        "socket_bytes": 0 if unsafe else isolation.socket_bytes(),
    }
    with _started(job, limits, unsafe) as process:
        most = len(cases) * (3 * limits.output_bytes + 100)
        reply, complaint = _listen(process, limits.total_seconds + _GRACE_SECONDS, most)
    if not reply.startswith(harness.READY):
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise RewardError(f"sandbox: did not start: {reason or 'no reason given'}")
    return _read_reports(reply[len(harness.READY) :], len(cases))


def mark() -> str:
    """What stands in the command line of every process that this process has in a sandbox."""
    return f"covey-sandbox-of-{os.getpid()}"


def require_isolation() -> None:
    """Raise ConfigError unless programs can be run in isolation here."""
    reason = isolation_problem()
    if reason:
        raise ConfigError(
            f"sandbox: programs cannot be isolated here: {reason}; `apt install bubblewrap` "
            "(0.7 or newer, and Linux must allow it namespaces), or set unsafe = true to run them "
            "unprotected"
        )


@cache
def isolation_problem() -> str:
    if not sys.platform.startswith("linux"):
        return f"this is {sys.platform}, not Linux"
    if not shutil.which("bwrap"):
        return "there is no bwrap"
    if filter_program() is None:
        return "the system calls of this kind of machine are not known"
    try:
        outcome = run_program("", [Case(call="6 * 7")])[0]
    except (RewardError, OSError) as error:
        return str(error)
    return "" if outcome.value == b"42" else f"a trial run was {outcome.ended}"


@cache
def _harness_code() -> Any:
    return compile(Path(harness.__file__).read_bytes(), "<harness>", "exec")


@contextlib.contextmanager
def _started(
    job: dict[str, Any], limits: Limits, unsafe: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the harness with its job, and have it and all that it started gone in the end."""
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
        stdin.write(marshal.dumps((_harness_code(), {**job, "place": place, "uid": uid})))
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
    """A file descriptor from which the filter of system calls can be read, once."""
    reads, writes = os.pipe()
    try:
        os.write(writes, filter_program() or b"")
        os.close(writes)
        yield reads
    finally:
        os.close(reads)


def _listen(process: subprocess.Popen[bytes], seconds: float, most: int) -> tuple[bytes, bytes]:
    """Return what the harness says, up to so many seconds after it is ready and so many bytes."""
    assert process.stdout
    assert process.stderr
    heard: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + _START_SECONDS
    ready = False
    with selectors.DefaultSelector() as selector:
        for file in heard:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                buffer = heard[key.fileobj]  # type: ignore[index]
                buffer += data
                if not data or len(buffer) > most + len(harness.READY):
                    selector.unregister(key.fileobj)
            if not ready and heard[process.stdout].startswith(harness.READY):
                ready = True
                deadline = time.monotonic() + seconds
    return bytes(heard[process.stdout]), bytes(heard[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that everything is dead. All in the sandbox dies with its first process."""
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()  # which ends a harness that is still alive
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
    """Read what the harness reported; cases without a report were killed with it."""
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
