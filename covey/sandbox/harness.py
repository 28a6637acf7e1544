"""The harness: the first process in the sandbox. Each test case runs in a child process.

The sandbox does not contain the package covey. Covey sends three things into the sandbox: the
compiled code of the harness, the program, and the program's test cases. Every program gets its own
sandbox, so the harness must start fast. The harness therefore imports only small modules such as
`_json` and `_signal`. Child processes, never the harness itself, run the untrusted program. The
harness does not know the expected results, so no program can read them.

As process 1 of its namespace, the harness gets no signals from the other processes of the
namespace. All processes of the namespace die when the harness ends.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import builtins
import gc
import os
import resource
import select
import sys
import time
from _json import encode_basestring_ascii as quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ENDED = ("exited", "timed out", "output limit", "killed")
READY = b"ready\n"
TICK = 20
"""Milliseconds between two checks of the sandbox's total memory."""
FILES = 10_000
"""Maximum number of files in a sandbox, because the size limit of files does not count the memory
of empty files."""
Pipe = tuple[int, int]


def main(job: dict[str, Any], take: Callable[[], Any]) -> None:
    """Run all test cases; for each case, write a line of numbers and the case's outputs to
    stdout.

    `take` reads the next test case. It is read only when it runs, because a child process has a
    copy of this process's memory, in which it could find the inputs of later cases.
    """
    compile("0", "<warm>", "eval")  # called once before forking, because the first call is slow
    gc.freeze()  # the GC skips these objects, so children share their memory
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # Python has a handler for it
    report = os.dup(1)
    if job["uid"] is not None:
        become(job["uid"])
    set_limits(job)
    write_all(report, READY)
    ends = time.monotonic() + job["total_seconds"]
    for number in range(job["cases"]):
        case = take()
        began = time.monotonic()
        deadline = min(began + job["wall_seconds"], ends)
        if deadline <= began:
            write_all(report, b"1 0 0 0 0 0\n")
            continue
        pipes = [os.pipe() for _ in range(4)]
        child = os.fork()
        if child == 0:
            as_child(job, number, case["call"], pipes)
        ended, code, outputs = supervise(job, case["stdin"], pipes, child, report, deadline)
        sizes = " ".join(str(len(output)) for output in outputs)
        line = f"{ended} {code} {time.monotonic() - began:.6f} {sizes}\n"
        write_all(report, line.encode() + b"".join(outputs))
        if job["isolated"] and not empty(job["place"]):
            break  # the next case must not see what this one left; the rest counts as killed
    os._exit(0)  # a normal exit would take longer


def become(uid: int) -> None:
    """Change from root to the sandbox's user id, because process limits do not apply to root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def write_all(file: int, data: bytes) -> None:
    """Write all data, in several calls if needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


class Watch:
    """Sends a child process its input, and reads its outputs up to a size limit."""

    def __init__(self, given: bytes, pipes: list[Pipe], limit: int, report: int) -> None:
        (reads, self.stdin), *outputs = pipes
        os.close(reads)
        self.given = memoryview(given)
        self.kept = {output: bytearray() for output, _ in outputs}
        self.limit = limit
        self.report = report
        self.poll = select.poll()
        self.poll.register(report, 0)
        for output, writes in outputs:
            os.close(writes)
            os.set_blocking(output, False)  # a child may have read its own output before us
            self.poll.register(output, select.POLLIN)
        os.set_blocking(self.stdin, False)
        self.poll.register(self.stdin, select.POLLOUT)

    def step(self, milliseconds: float) -> bool:
        """Transfer data to and from the child process, and return False after a timeout."""
        events = self.poll.poll(milliseconds)
        for file, _ in events:
            if file == self.report:
                os._exit(1)  # the parent has died and cannot end this process
            elif file == self.stdin:
                self._feed()
            else:
                self._keep(file)
        return bool(events)

    def _keep(self, file: int) -> None:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return
        self.kept[file] += data
        if not data:
            self.poll.unregister(file)

    def _feed(self) -> None:
        try:
            self.given = self.given[os.write(self.stdin, self.given[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:
            self.given = self.given[:0]
        if not self.given:
            self.poll.unregister(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def too_much(self) -> bool:
        """Return whether an output of the child process exceeds the size limit."""
        return any(len(data) > self.limit for data in self.kept.values())

    def close(self) -> list[bytes]:
        """Close the pipes and return the outputs."""
        for file in (*self.kept, *([self.stdin] if self.stdin >= 0 else [])):
            os.close(file)
        return [bytes(data[: self.limit]) for data in self.kept.values()]


def supervise(
    job: dict[str, Any], given: bytes, pipes: list[Pipe], child: int, report: int, deadline: float
) -> tuple[int, int, list[bytes]]:
    """Wait until a test case ends or exceeds a limit, then kill all its processes."""
    watch = Watch(given, pipes, job["output_bytes"], report)
    why, status, pause = "", None, 1.0
    looked = time.monotonic()
    while status is None and not why:
        pause = 1.0 if watch.step(pause) else min(2 * pause, TICK)
        status = reap(child)
        now = time.monotonic()
        if watch.too_much():
            why = "output limit"
        elif now > deadline:
            why = "timed out"
        elif job["isolated"] and now > looked + TICK / 1000:
            looked = now
            why = "killed" if uses_too_much(job) else ""
    last = end_all(child, job["isolated"])
    status = last if status is None else status
    while watch.step(0) and not watch.too_much():
        pass
    code = os.waitstatus_to_exitcode(status)
    if not why:
        why = "exited" if code >= 0 else "timed out" if code == -_signal.SIGXCPU else "killed"
    if watch.too_much():
        why = "output limit"
    return ENDED.index(why), code, watch.close()


def reap(child: int) -> int | None:
    """Reap dead processes, including orphans, and return the status of `child` if it was reaped."""
    found = None
    for _ in range(64):  # many dying orphans must not block the harness
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == child:
            found = status
        if pid == 0:
            break
    return found


def end_all(child: int, isolated: bool) -> int:
    """Kill all processes of a test case, and return the child's status.

    The status is 0 if the child was already reaped.
    """
    found = 0
    # Without isolation, -1 would mean every process of the user.
    targets = (-1,) if isolated and os.getpid() == 1 else (-child, child)
    while True:
        for target in targets:
            try:
                os.kill(target, _signal.SIGKILL)
            except OSError:
                continue  # no such process
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found
        if pid == child:
            found = status


def uses_too_much(job: dict[str, Any]) -> bool:
    """Return whether all processes together use too much memory or have too many files."""
    disk = os.statvfs(job["place"])
    if disk.f_files - disk.f_ffree > FILES:
        return True
    used = sockets = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            memory, seen = held_by(f"/proc/{name}")
            used, sockets = used + memory, max(sockets, seen)
    return bool(used + sockets * job["socket_bytes"] > job["memory_bytes"])


def held_by(process: str) -> tuple[int, int]:
    """Return a process's memory in bytes and its number of sockets, or (0, 0) if it has ended.

    All running threads of a process show the same numbers in /proc, so reading one thread is
    enough.
    """
    _, threads, _ = next(os.walk(f"{process}/task"), ("", [], []))  # none if it is gone
    for thread in threads:
        place = f"{process}/task/{thread}"
        lines = numbers_in(f"{place}/status", (b"RssAnon:", b"RssShmem:", b"VmSwap:"), 1)
        if lines:
            return sum(lines) << 10, sum(numbers_in(f"{place}/net/protocols", b"UNIX", 2))
    return 0, 0


def numbers_in(path: str, starts: bytes | tuple[bytes, ...], column: int) -> list[int]:
    """Read integers from one column of the lines that begin with `starts`. Return [] on an
    error."""
    try:
        with open(path, "rb") as file:
            return [int(line.split()[column]) for line in file if line.startswith(starts)]
    except OSError:
        return []


def empty(place: str) -> bool:
    """Remove the files that a test case left, and return whether nothing is left.

    Nested directories are first moved up, because the path of a deep directory can be too long.
    """
    moved = 0
    try:
        if os.stat(place).st_uid == os.getuid():  # the program may have closed it
            os.chmod(place, 0o1777)
        while folders := remove_files(place):
            for folder in folders:
                for inner in remove_files(folder):
                    moved += 1
                    while os.path.lexists(f"{place}/moved-{moved}"):  # the program's own name
                        moved += 1
                    os.rename(inner, f"{place}/moved-{moved}")
                os.rmdir(folder)
        return not os.listdir(place)
    except OSError:
        return False


def remove_files(folder: str) -> list[str]:
    """Remove a directory's files, make its subdirectories accessible, and return the
    subdirectories."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
    return folders


def as_child(job: dict[str, Any], number: int, call: str | None, pipes: list[Pipe]) -> None:
    """Run a test case in this child process, and then exit without the usual slow cleanup."""
    code = 0
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        os.setsid()
        for standard, end in ((0, pipes[0][0]), (1, pipes[1][1]), (2, pipes[2][1])):
            os.dup2(end, standard)
        value = pipes[3][1]
        os.closerange(3, value)
        os.closerange(value + 1, 1 << 12)
        run_case(job, number, call, value)
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 255)


def run_case(job: dict[str, Any], number: int, call: str | None, value: int) -> None:
    """Run the program. If the case has a `call`, write the call's value to the pipe `value`."""
    if not job["isolated"]:  # without isolation, nothing removes the files of a case
        os.mkdir(str(number))
        os.chdir(str(number))
    sys.path += job["paths"]
    sys.argv = ["answer.py"]
    for name in ("exit", "quit"):  # normally defined by `site`, which is slow to import
        setattr(builtins, name, sys.exit)
    name = "__main__" if call is None else "answer"
    module = type(sys)(name)
    sys.modules[name] = module
    cpu = job["cpu_seconds"]
    lower(resource.RLIMIT_CPU, cpu, cpu + 1)
    exec(compile(job["program"], f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    if call is not None:
        result = eval(compile(call, "<call>", "eval", dont_inherit=True), module.__dict__)
        write_all(value, encode(result).encode())


def exit_code(argument: object) -> int:
    """Return the exit code that the interpreter derives from the argument of `sys.exit`."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    print(argument, file=sys.stderr)
    return 1


def set_limits(job: dict[str, Any]) -> None:
    """Set the resource limits that the harness and its child processes have."""
    limits = {
        "AS": job["memory_bytes"],
        "FSIZE": job["file_bytes"],
        "NOFILE": 256,
        "CORE": 1,  # with 0 the kernel would still start a crash reporter
    }
    if job["isolated"]:
        # The harness itself is one more process.
        limits |= {"NPROC": job["processes"] + 1, "MSGQUEUE": 0, "MEMLOCK": 0, "SIGPENDING": 1000}
    for name, limit in limits.items():
        try:
            lower(getattr(resource, f"RLIMIT_{name}"), limit, limit)
        except (AttributeError, ValueError):
            if job["isolated"]:
                raise


def lower(kind: int, soft: int, hard: int) -> None:
    """Set the soft and the hard value of a resource limit, but never raise the hard value."""
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def encode(value: object) -> str:
    """Encode a value as JSON; a container or a value without a JSON type becomes `[kind, ...]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(text, text)
    if isinstance(value, bytes | bytearray):
        return f'["bytes", "{bytes(value).hex()}"]'
    if isinstance(value, complex):
        return f'["complex", {encode(value.real)}, {encode(value.imag)}]'
    if isinstance(value, dict):
        return sequence("dict", [part for item in value.items() for part in item])
    for kind, types in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return sequence(kind, list(value))
    return foreign(value)


def foreign(value: Any) -> str:
    """Encode numpy numbers and arrays, fractions and decimals by their conversion methods."""
    if hasattr(value, "__index__") and not hasattr(value, "tolist"):
        number = value.__index__()
        return int.__repr__(number) if -(2**63) < number < 2**63 else f'["int", "{number:#x}"]'
    if hasattr(value, "as_integer_ratio"):
        try:
            return f'["ratio", {", ".join(map(encode, value.as_integer_ratio()))}]'
        except (ValueError, OverflowError):  # not a number, or infinite
            return encode(float(value))
    if hasattr(value, "tolist"):
        lone = getattr(value, "ndim", 1) == 0
        return encode(value.tolist()) if lone else sequence("array", list(value))
    raise TypeError(f"the result contains {type(value).__name__}, which is not plain data")


def sequence(kind: str, items: list[object]) -> str:
    """Encode a container as a JSON list `[kind, item, ...]`."""
    return f'["{kind}", {", ".join(map(encode, items))}]' if items else f'["{kind}"]'
