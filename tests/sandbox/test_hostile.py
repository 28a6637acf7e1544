"""Programs that try to get out, to stay on, or to use up the machine. None may succeed.

Every one is run through the real sandbox, followed in the same sandbox by a good run, which must
not notice, and then by a good program in a sandbox of its own.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import covey
from covey.errors import ConfigError
from covey.sandbox import Case, Limits, Outcome, require_isolation, run
from covey.sandbox.run import mark
from covey.sandbox.seccomp import _CLONE, _MACHINES, _REFUSED

try:
    require_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

WALL = 1.0
LIMITS = Limits(
    cpu_seconds=2,
    wall_seconds=WALL,
    total_seconds=4.0,
    memory_bytes=96 << 20,
    processes=16,
    file_bytes=4 << 20,
    output_bytes=64 << 10,
)
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, subprocess, sys, threading, time
if sys.stdin.readline() == "good":
    print("good")
    sys.exit()
def attempt(function, *arguments):
    try:
        result = function(*arguments)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        print("DONE", result, flush=True)
def put(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
def get(path):
    with open(path, errors="replace") as file:
        return file.read()
def forever(action):
    while True:
        try:
            action()
        except OSError:
            pass
        except RuntimeError:
            pass
libc = ctypes.CDLL(None, use_errno=True)
def failure(result):
    return errno.errorcode[ctypes.get_errno()] if result == -1 else f"DONE {result}"
"""


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
    bad, good = run(PRELUDE + program, [Case(stdin="bad\n"), Case(stdin="good")], limits=LIMITS)
    assert time.monotonic() - began < WALL + 10
    assert bad.seconds < WALL + 5
    assert left_over() == []
    assert good.stdout == b"good\n", (bad, good)
    began = time.monotonic()
    after = run("def add(a, b): return a + b", [Case(call="add(1, 2)")], limits=LIMITS)
    assert time.monotonic() - began < 10
    assert after[0].value == b"3"
    return bad


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "time.sleep(1000)",
    "signals ignored": """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
    "signals answered": """
for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGXCPU):
    signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while True: time.sleep(100)
""",
    "stopped by itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "group stopped": "os.killpg(0, signal.SIGSTOP)",
    "fork bomb": "forever(os.fork)",
    "fork bomb in sessions": "forever(lambda: os.fork() or os.setsid())",
    "thread bomb": "forever(lambda: threading.Thread(target=time.sleep, args=(99,)).start())",
    "fork and exit": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
forever(lambda: os.fork() or os._exit(0))
""",
    "zombies": "forever(lambda: os.fork() or os._exit(0))",
    "orphans": "forever(lambda: os.fork() or (os.fork(), os._exit(0)))",
    "chain of forks": "forever(lambda: os.fork() and os._exit(0))\n",
    "all files closed": "os.closerange(0, 256)\nwhile True: pass",
    "exits refused": """
import atexit
atexit.register(lambda: time.sleep(100))
""",
    "thread that never ends": "threading.Thread(target=lambda: time.sleep(100)).start()",
    "reads for ever": "r, w = os.pipe()\nos.read(r, 1)",
    "lock for ever": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "deep compile": "forever(lambda: compile('(' * 90 + '1' + ')' * 90, 'x', 'eval'))",
}


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS)
def test_a_program_without_end_is_ended_in_time(program: str) -> None:
    outcome = attack(program)
    # The head of a chain of forks is gone at once, and the rest of the chain with it.
    assert outcome.ended == ("exited" if program == ENDLESS["chain of forks"] else "timed out")
    assert outcome.stdout == b""


FLOODS = {
    "stdout": "while True: print('x' * 1000)",
    "stderr": "while True: print('x' * 1000, file=sys.stderr)",
    "from many processes": "for _ in range(3): os.fork()\nwhile True: os.write(1, b'x' * 1000)",
    "from an orphan": """
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b"x" * 1000)
time.sleep(100)
""",
    "to every file": """
def flood():
    for file in range(1, 256):
        try: os.set_blocking(file, False), os.write(file, b"0 0 0 1 0 0\\nx" * 1000)
        except OSError: pass
while True: flood()
""",
}


@pytest.mark.parametrize("program", FLOODS.values(), ids=FLOODS)
def test_endless_output_is_cut_and_ends_the_program(program: str) -> None:
    outcome = attack(program)
    assert outcome.ended == "output limit"
    assert max(len(outcome.stdout), len(outcome.stderr), len(outcome.value)) == LIMITS.output_bytes


HOGS = {
    "memory of many processes": """
for _ in range(7):
    if os.fork() == 0: break
data = b"x" * (30 << 20)
time.sleep(100)
""",
    "shared memory of many processes": """
for _ in range(7):
    if os.fork() == 0: break
data = mmap.mmap(-1, 30 << 20)
for at in range(0, len(data), 4096): data[at] = 1
time.sleep(100)
""",
    "empty files": "n = 0\nwhile True: put(f'{n}', ''); n += 1",
    "empty folders": "while True: os.mkdir('d'); os.chdir('d')",
    "closed folders": "while True: os.mkdir('d'); os.chdir('d'); os.chmod('.', 0o300)",
}


@pytest.mark.parametrize("program", HOGS.values(), ids=HOGS)
def test_what_processes_hold_together_is_limited(program: str) -> None:
    outcome = attack(program)
    assert (outcome.ended, outcome.stdout, outcome.stderr) == ("killed", b"", b"")


def test_memory_of_one_process_is_limited() -> None:
    program = """
data = []
try:
    while True: data.append(mmap.mmap(-1, 1 << 20))
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
    from concurrent.futures import ThreadPoolExecutor

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
        outcomes = list(pool.map(lambda _: run(program, [Case()], limits=LIMITS)[0], range(2)))
    assert [outcome.stdout for outcome in outcomes] == [b"16", b"16"]


CRASHES = {
    "abort": ("os.abort()", -6),
    "null pointer": ("ctypes.string_at(0)", -11),
    "kills itself": ("os.kill(os.getpid(), 9)", -9),
    "kills its group": ("os.killpg(0, 9)", -9),
    "kills everybody": (
        "if os.fork() == 0: time.sleep(9)\nos.kill(-1, 9)\nprint(os.wait()[1])\nos.kill(os.getpid(), 9)",
        -9,
    ),
}


@pytest.mark.parametrize(("program", "code"), CRASHES.values(), ids=CRASHES)
def test_a_crash_is_that_of_the_program(program: str, code: int) -> None:
    outcome = attack(program)
    assert (outcome.ended, outcome.exit_code) == ("killed", code)


def test_endless_recursion_ends() -> None:
    outcome = attack("sys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()")
    assert not outcome.ran


def test_a_crash_leaves_no_core() -> None:
    program = """
if os.fork() == 0: os.abort()
os.wait()
print(os.listdir("."), resource.getrlimit(resource.RLIMIT_CORE))
"""
    assert attack(program).stdout == b"[] (1, 1)\n"


STAYERS = {
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
print("gone")
""",
    "daemon without files": """
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 256)
    if os.fork() == 0: forever(os.fork)
    os._exit(0)
print("gone")
""",
    "daemon of another program": """
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("gone")
""",
    "children": "for _ in range(5):\n    if os.fork() == 0: time.sleep(1000)\nprint('gone')",
}


@pytest.mark.parametrize("program", STAYERS.values(), ids=STAYERS)
def test_nothing_outlives_its_program(program: str) -> None:
    before = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    outcome = attack(program)
    assert (outcome.ended, outcome.stdout) == ("exited", b"gone\n")
    sleepers = [
        pid
        for pid in os.listdir("/proc")
        if pid.isdigit() and int(pid) not in before and b"sleep(1000)" in command_line(pid)
    ]
    assert sleepers == []


def command_line(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


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


def test_nobody_else_can_be_killed_or_seen() -> None:
    program = f"""
attempt(os.kill, {os.getpid()}, 9)
attempt(os.kill, {os.getppid()}, 9)
for number in range(1, 32):
    os.kill(1, number)
    os.kill(os.getppid(), number)
time.sleep(0.1)
print(os.getppid())
"""
    assert attack(program).stdout == b"ProcessLookupError\nProcessLookupError\n1\n"


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


def test_every_refused_system_call_is_refused() -> None:
    column = _MACHINES[platform.machine()][1]
    numbers = [pair[column] for pair in _REFUSED.values()]
    program = f"""
libc.syscall.restype = ctypes.c_long
for number in {numbers}: print(failure(libc.syscall(number, 0, 0, 0, 0, 0, 0)))
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    print(failure(libc.syscall({_CLONE[column]}, flag | 17, 0, 0, 0, 0)))
"""
    assert attack(program).stdout.split() == [b"EPERM"] * (len(numbers) + 4)


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
def test_root_is_given_up_for_a_user_that_nobody_is() -> None:
    outcome = attack("print(os.getresuid(), os.getresgid(), os.getgroups())")
    uid = outcome.stdout.split(b",")[0].strip(b"(")
    assert int(uid) > 1000
    assert outcome.stdout == b"(%b, %b, %b) (%b, %b, %b) []\n" % ((uid,) * 6)


def test_reports_cannot_be_forged_by_printing_them() -> None:
    forged = "0 0 0.001 5 0 2\nhello42"
    outcome = attack(f"print({forged!r}, end='', flush=True)\nos._exit(0)")
    assert (outcome.stdout, outcome.value) == (forged.encode(), b"")


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
