"""Programs that try to get out, to stay on, or to use up the machine. None may succeed.

Every one is run through the real sandbox, followed in the same sandbox by a good run, which must
not notice, and then by a good program in a sandbox of its own.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import covey
from covey.errors import ConfigError
from covey.sandbox import Case, Outcome, matches, require_isolation, run_program
from covey.sandbox.program import mark
from covey.sandbox.seccomp import _MACHINES, ALLOWED, CHECKED, MISSING, NEWER, numbers
from tests.sandbox.hostile import LIMITS, PRELUDE, PROGRAMS, TIMED_OUT, WALL, Hostile

try:
    require_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)
SIDE_BY_SIDE = 3
NEVER_RETURNS = ("endless loop", "fork bomb", "dying processes", "closed files", "daemon")
"""Kinds of programs that use a processor until they are killed, and so come to no call."""
ONLY_STAY = ("closed files", "endless loop", "exit hooks", "one endless call", "orphans", "signals")
ONLY_STAY += ("stopping", "waiting")
"""Kinds of programs that do all they do at once, and then only refuse to end."""
SHORT = replace(LIMITS, wall_seconds=0.4)


def left_over() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes()
        except OSError:
            continue
        if mark().encode() in line:
            found.append(file.parent.name)
    return found


def attack(program: str) -> Outcome:
    """Run a hostile program; check that it is over, that nothing is left and nothing is harmed."""
    began = time.monotonic()
    bad, good = run_program(
        PRELUDE + program, [Case(stdin="bad\n"), Case(stdin="good")], limits=LIMITS
    )
    assert time.monotonic() - began < WALL + 10
    assert bad.seconds < WALL + 5
    assert left_over() == []
    assert good.stdout == b"good\n", (bad, good)
    began = time.monotonic()
    after = run_program("def add(a, b): return a + b", [Case(call="add(1, 2)")], limits=LIMITS)
    assert time.monotonic() - began < 10
    assert after[0].value == b"3"
    return bad


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Every program of the table, side by side, each followed by a good run and a call."""

    def try_one(hostile: Hostile) -> list[Outcome]:
        cases = [Case(stdin="bad\n"), Case(stdin="good")]
        if hostile.kind not in NEVER_RETURNS:
            cases.append(Case(stdin="bad\n", call="answer"))
        stays = hostile.ended == TIMED_OUT and hostile.kind in ONLY_STAY
        limits = SHORT if stays else LIMITS
        return run_program(PRELUDE + hostile.program, cases, limits=limits)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = dict(zip(PROGRAMS, pool.map(try_one, PROGRAMS.values()), strict=True))
    assert left_over() == []
    return found


def test_there_are_sixty_programs_of_thirty_kinds() -> None:
    assert len(PROGRAMS) >= 60
    assert len({hostile.kind for hostile in PROGRAMS.values()}) >= 30


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_gains_nothing(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    bad, good, *calls = outcomes[name]
    hostile = PROGRAMS[name]
    assert len(calls) == (hostile.kind not in NEVER_RETURNS)
    target = f"target-{name}"  # which is nowhere in the sandbox
    assert bad.ended in hostile.ended, bad
    assert b"DONE" not in bad.stdout, bad
    assert max(outcome.seconds for outcome in (bad, *calls)) < WALL + 1.0
    assert max(len(bad.stdout), len(bad.stderr), len(bad.value)) <= LIMITS.output_bytes
    assert (good.stdout, good.ran) == (b"good\n", True), good
    assert not any(call.ran and matches(target, call.value) for call in calls), calls


def test_a_good_program_after_all_that_notices_nothing(outcomes: dict[str, list[Outcome]]) -> None:
    assert outcomes
    began = time.monotonic()
    after = run_program("def add(a, b): return a + b", [Case(call="add(1, 2)")], limits=LIMITS)
    assert time.monotonic() - began < 10
    assert after[0].value == b"3"


def test_memory_of_one_process_is_limited() -> None:
    program = """
data = []
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
try:
    while True: data.append(mmap.mmap(-1, 1 << 20, private))
except OSError:
    print(len(data))
bytes(100 << 20)
"""
    outcome = attack(program)
    assert outcome.stderr.rstrip().endswith(b"MemoryError")
    assert 30 < int(outcome.stdout) < 96


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "."])
def test_files_together_are_limited(place: str) -> None:
    program = f"""
n = 0
try:
    while True: put(f"{place}/f{{n}}", "x" * (1 << 20)); n += 1
except OSError as error:
    print(n, errno.errorcode[error.errno])
"""
    outcome = attack(program)
    assert outcome.stdout == b"3 ENOSPC\n" or outcome.stdout == b"4 ENOSPC\n"


def test_one_file_is_limited() -> None:
    program = """
file = open("big", "wb", buffering=0)
attempt(file.seek, 1 << 40)
attempt(file.write, b"x")
attempt(file.truncate, 1 << 40)
"""
    assert attack(program).stdout == b"DONE 1099511627776\nOSError\nOSError\n"


@pytest.mark.parametrize("kind", ["os.fork()", "threading.Thread(target=time.sleep, args=(9,))"])
def test_processes_and_threads_stop_at_the_limit(kind: str) -> None:
    start = "(os.fork() or time.sleep(9))" if "fork" in kind else f"{kind}.start()"
    program = f"""
threading.stack_size(1 << 18)
n = 1
try:
    while n < 500: {start}; n += 1
except (OSError, RuntimeError):
    print(n, flush=True)
os._exit(0)
"""
    assert attack(program).stdout == b"%d\n" % LIMITS.processes


def test_two_sandboxes_do_not_share_the_limit_on_processes() -> None:
    program = """
import os, time
n = 1
try:
    while n < 500: os.fork() or time.sleep(9); n += 1
except OSError:
    time.sleep(0.3)
    os.write(1, b"%d" % n)
"""
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(
            pool.map(lambda _: run_program(program, [Case()], limits=LIMITS)[0], range(2))
        )
    assert [outcome.stdout for outcome in outcomes] == [b"16", b"16"]


def test_a_crash_leaves_no_core() -> None:
    program = """
if os.fork() == 0: os.abort()
os.wait()
print(os.listdir("."), resource.getrlimit(resource.RLIMIT_CORE))
"""
    assert attack(program).stdout == b"[] (1, 1)\n"


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[dict[str, socket.socket]]:
    sockets = {
        "tcp": socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        "abstract": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    }
    sockets["tcp"].bind(("127.0.0.1", 0))
    sockets["udp"].bind(("127.0.0.1", 0))
    sockets["unix"].bind(str(tmp_path / "s"))
    sockets["abstract"].bind(f"\0covey-{os.getpid()}")
    for name, listener in sockets.items():
        if name != "udp":
            listener.listen()
        listener.setblocking(False)
    yield sockets
    for listener in sockets.values():
        listener.close()


def test_no_socket_reaches_a_listener(listeners: dict[str, socket.socket]) -> None:
    tcp, udp = listeners["tcp"].getsockname(), listeners["udp"].getsockname()
    program = f"""
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.connect(address)
        s.send(b"out")
attempt(connect, socket.AF_INET, socket.SOCK_STREAM, {tcp})
attempt(connect, socket.AF_INET, socket.SOCK_DGRAM, {udp})
attempt(connect, socket.AF_UNIX, socket.SOCK_STREAM, {str(listeners["unix"].getsockname())!r})
attempt(connect, socket.AF_UNIX, socket.SOCK_STREAM, {listeners["abstract"].getsockname()!r})
attempt(connect, socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1))
attempt(connect, socket.AF_NETLINK, socket.SOCK_RAW, (0, 0))
attempt(socket.getaddrinfo, "example.com", 80)
"""
    outcome = attack(program)
    assert outcome.stdout.split() == [b"PermissionError"] * 6 + [b"gaierror"]
    for name, listener in listeners.items():
        with pytest.raises(BlockingIOError):
            listener.recv(10) if name == "udp" else listener.accept()


def test_every_namespace_that_matters_is_another_one() -> None:
    names = ["cgroup", "ipc", "mnt", "net", "pid", "uts"]
    outcome = attack(f"for n in {names}: print(os.readlink(f'/proc/self/ns/{{n}}'))")
    ours = [os.readlink(f"/proc/self/ns/{name}") for name in names]
    inside = outcome.stdout.decode().split()
    assert len(inside) == len(names)
    assert not set(ours) & set(inside)


def test_the_environment_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CANARY", "yellow-bird")
    program = """
print(dict(os.environ))
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try: print(get(f"/proc/{pid}/environ"))
        except OSError: print(pid, "refused")
print(sorted(int(pid) for pid in os.listdir("/proc") if pid.isdigit())[0], os.getppid())
"""
    outcome = attack(program)
    assert outcome.ran
    assert outcome.stdout.endswith(b"1 1\n")
    assert b"yellow" not in outcome.stdout + outcome.stderr
    assert b"COVEY" not in outcome.stdout + outcome.stderr


def test_files_outside_cannot_be_read_written_or_linked(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("yellow")
    tmp_path.chmod(0o777)
    canary.chmod(0o666)
    project = Path(covey.__file__)
    # Python itself may lie below the home folder; then the way to it is all there is of it.
    way_to_python = Path(os.path.realpath(sys.base_prefix)).parts
    program = f"""
for path in ({str(canary)!r}, {str(project)!r}, "/etc/shadow", "/etc/passwd", "/etc/hostname",
             "/proc/1/root{canary}", "/proc/self/root{canary}", "/dev/mem", "/dev/kmsg", "/dev/vda"):
    try: print("DONE", get(path))
    except (FileNotFoundError, PermissionError): print("refused")
os.symlink({str(canary)!r}, "link")
attempt(get, "link")
attempt(put, "link")
attempt(os.link, sys.executable, "hard")
attempt(os.listdir, {str(tmp_path)!r})
attempt(os.listdir, {str(project.parent)!r})
attempt(put, {str(tmp_path / "new")!r})
print([name for name in os.listdir({str(Path.home())!r}) if name not in {way_to_python!r}]
      if os.path.exists({str(Path.home())!r}) else [])
"""
    lines = attack(program).stdout.decode().splitlines()
    assert lines[:10] == ["refused"] * 10
    missing = "FileNotFoundError"
    assert lines[10:] == [missing, missing, "OSError", missing, missing, missing, "[]"]
    assert [p.name for p in tmp_path.iterdir()] == ["canary"]
    assert canary.read_text() == "yellow"


def test_the_system_cannot_be_written() -> None:
    paths = ["/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", "/proc/x", "/lib/x"]
    paths += [f"{Path.home()}/x"]
    paths += ["/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"]
    paths += ["/sys/x", "/proc/sys/vm/drop_caches", "/proc/1/oom_score_adj", os.__file__]
    program = f"""
for path in {paths}:
    try: put(path, "c")
    except OSError: print("refused")
    else: print("DONE", path)
"""
    assert attack(program).stdout.split() == [b"refused"] * len(paths)
    assert not any(Path(path).exists() for path in ("/x", "/usr/x", "/etc/x", "/dev/x"))


def test_no_process_outside_can_be_killed_or_seen() -> None:
    outside = {os.getpid(), os.getppid()} - {1}  # 1 is another process in there
    program = f"""
for process in {outside}:
    attempt(os.kill, process, 9)
for number in range(1, 32):
    os.kill(1, number)
    os.kill(os.getppid(), number)
time.sleep(0.1)
print(os.getppid())
"""
    assert attack(program).stdout == b"ProcessLookupError\n" * len(outside) + b"1\n"


def test_no_right_can_be_gained() -> None:
    program = """
def attempt(function, *arguments):
    try: print("DONE", function(*arguments))
    except (OSError, ValueError): print("refused")
attempt(os.setuid, 0)
attempt(os.setgid, 0)
attempt(os.setgroups, [0])
attempt(os.chroot, "/tmp")
attempt(os.nice, -5)
attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))
attempt(resource.setrlimit, resource.RLIMIT_NPROC, (999, 999))
attempt(os.mknod, "node", 0o60666, os.makedev(254, 0))
attempt(socket.sethostname, "x")
attempt(os.chmod, "/tmp/..", 0o777)
fields = dict(line.split(":\\t") for line in get("/proc/self/status").splitlines())
print(fields["CapEff"], fields["CapPrm"], fields["NoNewPrivs"], fields["Seccomp"])
print(subprocess.run(["/usr/bin/su", "-c", "id -u"], capture_output=True, timeout=5).stdout)
"""
    lines = attack(program).stdout.decode().splitlines()
    assert lines == [*["refused"] * 11, "0" * 16 + " " + "0" * 16 + " 1 2", "b''"]


def test_every_call_that_is_not_listed_is_refused() -> None:
    column = _MACHINES[platform.machine()][1]
    listed = {*numbers(ALLOWED, column).values(), *numbers(CHECKED, column).values()}
    missing = {*numbers(MISSING, column).values(), *range(NEWER, NEWER + 50)}
    # Linux lets these two past any filter, and ends whoever is not a probe of its own.
    listed |= {335, 336} if column == 0 else set()
    others = [number for number in range(NEWER + 50) if number not in listed]
    program = f"for n in {others}: print(failure(libc.syscall(n, 0, 0, 0, 0, 0, 0)))"
    expected = [b"ENOSYS" if number in missing else b"EPERM" for number in others]
    assert attack(program).stdout.split() == expected
    for name in ("bpf", "ptrace", "semget", "memfd_create", "io_uring_setup", "mount", "socket"):
        assert not re.search(rf"\b{name}=", ALLOWED + CHECKED), name


def test_nothing_can_be_typed_into_a_terminal() -> None:
    program = """
import termios
for file in (0, 1, 2): attempt(fcntl.ioctl, file, termios.TIOCSTI, b"x")
attempt(open, "/dev/tty")
print(os.getsid(0) == os.getpid())
"""
    expected = ["PermissionError"] * 3 + ["FileNotFoundError", "True"]
    assert attack(program).stdout.decode().split() == expected


def test_the_harness_cannot_be_read_or_changed() -> None:
    program = """
print(os.listdir("/proc/1"))
attempt(open, "/proc/1/mem", "r+b")
attempt(put, "/proc/1/mem")
attempt(os.unlink, "/proc/1/mem")
print(failure(libc.umount(b"/proc/1")))
"""
    lines = attack(program).stdout.decode().splitlines()
    assert lines[:2] == ["[]", "FileNotFoundError"]
    assert lines[2:] == ["OSError", "OSError", "EPERM"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_a_user_id_of_its_own() -> None:
    outcome = attack("print(os.getresuid(), os.getresgid(), os.getgroups())")
    uid = outcome.stdout.split(b",")[0].strip(b"(")
    assert int(uid) > 1000
    assert outcome.stdout == b"(%b, %b, %b) (%b, %b, %b) []\n" % ((uid,) * 6)


def test_output_taken_back_does_not_hold_up_the_harness() -> None:
    program = """
back = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
end = time.monotonic() + 0.4
while time.monotonic() < end:
    os.write(1, b"x")
    try: os.read(back, 10)
    except BlockingIOError: pass
time.sleep(100)
"""
    assert attack(program).ended == "timed out"


def test_open_files_of_ours_are_not_inherited(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        program = """
for number in range(3, 256):
    try: os.write(number, b"out")
    except OSError: pass
for number in range(256):
    try: print(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
    except OSError: pass
"""
        outcome = attack(program)
        assert file.read() == ""
    assert outcome.stdout.split() == [b"pipe"] * 4
