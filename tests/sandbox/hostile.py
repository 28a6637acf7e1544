"""Hostile programs by kind, and how each must end. `DONE` in an output means that one got through.

A kind is what is abused. `ended` names every ending that is in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.sandbox import Limits

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
libc.syscall.restype = ctypes.c_long
def failure(result):
    return errno.errorcode[ctypes.get_errno()] if result == -1 else f"DONE {result}"
def hold(memory):
    # Written to, then let go of: shared memory stays, and no process accounts for it.
    piece = b"x" * (1 << 20)
    for at in range(0, len(memory), len(piece)):
        memory[at : at + len(piece)] = piece
        memory.madvise(mmap.MADV_DONTNEED, at, len(piece))
    print("DONE", len(memory), flush=True)
"""
EXITED, TIMED_OUT, FLOODED, KILLED = ("exited",), ("timed out",), ("output limit",), ("killed",)


@dataclass(frozen=True)
class Hostile:
    kind: str
    program: str
    ended: tuple[str, ...] = EXITED


PROGRAMS = {
    # Time.
    "loop": Hostile("endless loop", "while True: pass", TIMED_OUT),
    "deep compile": Hostile(
        "endless loop",
        "forever(lambda: compile('(' * 90 + '1' + ')' * 90, 'x', 'eval'))",
        TIMED_OUT,
    ),
    "power": Hostile("one endless call", "10 ** 10 ** 9", (*TIMED_OUT, *EXITED)),
    "regular expression": Hostile(
        "one endless call", "import re\nre.match('(a+)+b', 'a' * 60)", TIMED_OUT
    ),
    "sleep": Hostile("waiting", "time.sleep(1000)", TIMED_OUT),
    "reads for ever": Hostile("waiting", "r, w = os.pipe()\nos.read(r, 1)", TIMED_OUT),
    "lock for ever": Hostile(
        "waiting", "lock = threading.Lock(); lock.acquire(); lock.acquire()", TIMED_OUT
    ),
    "exits refused": Hostile(
        "exit hooks", "import atexit\natexit.register(lambda: time.sleep(100))", TIMED_OUT
    ),
    "thread that never ends": Hostile(
        "exit hooks", "threading.Thread(target=lambda: time.sleep(100)).start()", TIMED_OUT
    ),
    "signals ignored": Hostile(
        "signals",
        """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        TIMED_OUT,
    ),
    "signals answered": Hostile(
        "signals",
        """
for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGXCPU):
    signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while True: time.sleep(100)
""",
        TIMED_OUT,
    ),
    "stopped by itself": Hostile("stopping", "os.kill(os.getpid(), signal.SIGSTOP)", TIMED_OUT),
    "group stopped": Hostile("stopping", "os.killpg(0, signal.SIGSTOP)", TIMED_OUT),
    "all files closed": Hostile(
        "closed files", "os.closerange(0, 256)\nwhile True: pass", TIMED_OUT
    ),
    # Processes.
    "fork bomb": Hostile("fork bomb", "forever(os.fork)", TIMED_OUT),
    "fork bomb in sessions": Hostile(
        "fork bomb", "forever(lambda: os.fork() or os.setsid())", TIMED_OUT
    ),
    "thread bomb": Hostile(
        "thread bomb",
        "forever(lambda: threading.Thread(target=time.sleep, args=(99,)).start())",
        TIMED_OUT,
    ),
    "fork and exit": Hostile(
        "dying processes",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nforever(lambda: os.fork() or os._exit(0))",
        TIMED_OUT,
    ),
    "zombies": Hostile("dying processes", "forever(lambda: os.fork() or os._exit(0))", TIMED_OUT),
    "orphans": Hostile(
        "orphans", "forever(lambda: os.fork() or (os.fork(), os._exit(0)))", TIMED_OUT
    ),
    # The head of a chain of forks is gone at once, and the rest of the chain with it.
    "chain of forks": Hostile("orphans", "forever(lambda: os.fork() and os._exit(0))\n", EXITED),
    "daemon": Hostile(
        "daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
print("gone")
""",
    ),
    "daemon without files": Hostile(
        "daemon",
        """
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 256)
    if os.fork() == 0: forever(os.fork)
    os._exit(0)
print("gone")
""",
    ),
    "daemon of another program": Hostile(
        "daemon",
        """
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("gone")
""",
    ),
    "children left": Hostile(
        "daemon", "for _ in range(5):\n    if os.fork() == 0: time.sleep(1000)\nprint('gone')"
    ),
    # Output.
    "stdout": Hostile("flood", "while True: print('x' * 1000)", FLOODED),
    "stderr": Hostile("flood", "while True: print('x' * 1000, file=sys.stderr)", FLOODED),
    "flood from many": Hostile(
        "flood of many",
        "for _ in range(3): os.fork()\nwhile True: os.write(1, b'x' * 1000)",
        FLOODED,
    ),
    "flood from an orphan": Hostile(
        "flood of many",
        """
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b"x" * 1000)
time.sleep(100)
""",
        FLOODED,
    ),
    "flood of every file": Hostile(
        "forged reports",
        """
def flood():
    for file in range(1, 256):
        try: os.set_blocking(file, False), os.write(file, b"0 0 0 1 0 0\\nx" * 1000)
        except OSError: pass
while True: flood()
""",
        FLOODED,
    ),
    "report printed": Hostile("forged reports", "os.write(1, b'0 0 0.001 5 0 2\\nhello42')"),
    "value written to every file": Hostile(
        "forged reports",
        """
for file in range(3, 256):
    try: os.write(file, b'"guess"')
    except OSError: pass
os._exit(0)
""",
    ),
    "equal to everything": Hostile(
        "false results",
        """
class Any(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
answer = Any("x")
""",
    ),
    "number that lies": Hostile(
        "false results", "class N(int):\n    __repr__ = lambda s: '7'\nanswer = N(3)"
    ),
    "harness patched": Hostile(
        "false results",
        """
import builtins, gc
for thing in gc.get_objects():
    if isinstance(thing, dict) and "encode" in thing and "sequence" in thing:
        thing["encode"] = lambda value: '"guess"'
builtins.compile = builtins.eval = lambda *a, **k: "guess"
answer = "x"
""",
    ),
    "target searched for": Hostile(
        "false results",
        """
import gc
texts = [t for t in gc.get_objects() if isinstance(t, dict)]
found = [v for d in texts for v in d.values() if isinstance(v, str) and v.startswith("target-")]
answer = found[0] if found else "none"
""",
    ),
    # Memory.
    "memory of many": Hostile(
        "memory of many",
        """
for _ in range(7):
    if os.fork() == 0: break
data = b"x" * (30 << 20)
time.sleep(100)
""",
        KILLED,
    ),
    "memory behind a dead thread": Hostile(
        "hidden memory",
        """
def stay():
    time.sleep(0.05)
    data = b"x" * (30 << 20)
    time.sleep(100)
for _ in range(7):
    if os.fork() == 0: break
threading.stack_size(1 << 18)
threading.Thread(target=stay).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # the end of this thread alone
""",
        KILLED,
    ),
    "memory of one": Hostile("memory of one", "data = b'x' * (100 << 20)\nprint('DONE')"),
    "maps of one": Hostile(
        "memory of one",
        """
data = []
while True: data.append(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
""",
    ),
    "shared memory let go": Hostile(
        "shared memory",
        """
for _ in range(11):
    if os.fork() == 0: break
hold(mmap.mmap(-1, 60 << 20))
time.sleep(100)
""",
    ),
    "shared memory that is checked": Hostile(
        "shared memory",
        "hold(mmap.mmap(-1, 60 << 20, 3 | mmap.MAP_ANONYMOUS))\ntime.sleep(100)",
    ),
    "huge pages": Hostile(
        "huge pages",
        "attempt(mmap.mmap, -1, 2 << 20, 0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
    ),
    "zero device": Hostile(
        "memory of a device",
        """
file = os.open("/dev/zero", os.O_RDWR)
hold(mmap.mmap(file, 60 << 20))
time.sleep(100)
""",
    ),
    "other devices": Hostile(
        "memory of a device",
        """
for name in os.listdir("/dev"):
    try: hold(mmap.mmap(os.open(f"/dev/{name}", os.O_RDWR), 8 << 20))
    except (OSError, ValueError): print("refused")
""",
    ),
    "nameless files": Hostile("nameless files", "attempt(os.memfd_create, 'x')"),
    "semaphores": Hostile("System V", "print(failure(libc.semget(0, 32000, 0o600)))"),
    "System V memory": Hostile("System V", "print(failure(libc.shmget(0, 1 << 20, 0o600)))"),
    "message queues": Hostile(
        "message queues",
        "print(failure(libc.msgget(0, 0o600)), failure(libc.mq_open(b'/q', 66, 0o600, 0)))",
    ),
    "socket buffers": Hostile(
        "socket buffers",
        """
for _ in range(7):
    if os.fork() == 0: break
pairs = []
while True:
    pairs.append(socket.socketpair())
    for end in pairs[-1]:
        end.setblocking(False)
        try:
            while True: end.send(b"x" * 65536)
        except OSError: pass
""",
        KILLED,
    ),
    "larger socket buffers": Hostile(
        "socket buffers",
        """
a, b = socket.socketpair()
attempt(a.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
""",
    ),
    "sockets in sockets": Hostile(
        "socket buffers",
        """
a, b = socket.socketpair()
a.setblocking(False)
while True:
    pair = socket.socketpair()
    pair[0].setblocking(False)
    try:
        while True: pair[0].send(b"x" * 65536)
    except OSError: pass
    try: socket.send_fds(a, [b"x"], [pair[0].fileno(), pair[1].fileno()])
    except OSError: pass
    else: [end.close() for end in pair]
""",
        (*KILLED, *EXITED, *TIMED_OUT),
    ),
    "pipe buffers": Hostile(
        "pipe buffers",
        """
pipes = []
try:
    while True:
        pipes.append(os.pipe())
        os.set_blocking(pipes[-1][1], False)
        try: fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
        except OSError: pass
        try:
            while True: os.write(pipes[-1][1], b"x" * 65536)
        except BlockingIOError: pass
except OSError: print(len(pipes))
""",
    ),
    "pages given to a pipe": Hostile(
        "pipe buffers", "r, w = os.pipe()\nprint(failure(libc.vmsplice(w, 0, 0, 0)))"
    ),
    "pending signals": Hostile(
        "pending signals",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
n = 0
while n < 5000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0: n += 1
print(n if n <= 1000 else f"DONE {n}")
""",
    ),
    "locked memory": Hostile("locked memory", "print(failure(libc.mlockall(3)))"),
    # Files.
    "empty files": Hostile("many files", "n = 0\nwhile True: put(f'{n}', ''); n += 1", KILLED),
    "empty folders": Hostile("deep folders", "while True: os.mkdir('d'); os.chdir('d')", KILLED),
    "closed folders": Hostile(
        "deep folders", "while True: os.mkdir('d'); os.chdir('d'); os.chmod('.', 0o300)", KILLED
    ),
    "attributes": Hostile(
        "attributes", "put('f')\nattempt(os.setxattr, 'f', 'user.x', b'x' * 60000)"
    ),
    "far write": Hostile(
        "large file", "f = open('big', 'wb', buffering=0); f.seek(1 << 40); attempt(f.write, b'x')"
    ),
    # Crashes.
    "abort": Hostile("crash", "os.abort()", KILLED),
    "null pointer": Hostile("crash", "ctypes.string_at(0)", KILLED),
    "recursion": Hostile(
        "recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()",
        (*KILLED, *EXITED, *TIMED_OUT),
    ),
    "kills itself": Hostile("kills", "os.kill(os.getpid(), 9)", KILLED),
    "kills its group": Hostile("kills", "os.killpg(0, 9)", KILLED),
    "kills everybody": Hostile(
        "kills",
        "if os.fork() == 0: time.sleep(9)\nos.kill(-1, 9)\nprint(os.wait()[1])\nos.kill(os.getpid(), 9)",
        KILLED,
    ),
    # The harness, which is process 1 and of the same user.
    "harness signalled": Hostile(
        "harness signalled",
        "for n in range(1, 65):\n    os.kill(1, n)\ntime.sleep(0.1)\nprint(os.getppid())",
    ),
    "harness starved": Hostile(
        "harness starved",
        """
attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt(os.setpriority, os.PRIO_USER, 0, 19)
attempt(os.setpriority, os.PRIO_PGRP, 1, 19)
attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
attempt(os.sched_setaffinity, 1, {0})
for _ in range(12):
    if os.fork() == 0: break
while True: pass
""",
        TIMED_OUT,
    ),
    "harness limited": Hostile(
        "harness limited",
        "attempt(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))\n"
        "attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0))",
    ),
    "harness read": Hostile(
        "harness read",
        "attempt(open, '/proc/1/mem', 'r+b')\nattempt(os.readlink, '/proc/1/fd/1')\n"
        "print(failure(libc.ptrace(16, 1, 0, 0)))",
    ),
    "spared when memory runs out": Hostile(
        "oom score",
        """
for path in ("/proc/self/oom_score_adj", "/proc/self/oom_adj"):
    for value in ("-1000", "0"): attempt(put, path, value)
print(get("/proc/self/oom_score_adj"))
""",
    ),
    "hidden from those who look": Hostile("hiding", "print(failure(libc.prctl(4, 0, 0, 0, 0)))"),
    # The kernel and the outside.
    "network": Hostile(
        "network",
        """
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_VSOCK):
    attempt(socket.socket, family, socket.SOCK_STREAM)
attempt(socket.socketpair, socket.AF_INET)
attempt(socket.getaddrinfo, "example.com", 80)
""",
    ),
    "namespaces": Hostile(
        "namespaces",
        """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000): print(failure(libc.unshare(flag)))
print(failure(libc.syscall(435, 0, 0)))
""",
    ),
    "mounts": Hostile(
        "mounts",
        "print(failure(libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)), failure(libc.umount(b'/proc/1')))",
    ),
    "rights": Hostile(
        "rights",
        """
for call in (os.setuid, os.setgid): attempt(call, 0)
attempt(os.setgroups, [0])
attempt(os.nice, -5)
attempt(resource.setrlimit, resource.RLIMIT_NPROC, (999, 999))
attempt(os.mknod, "node", 0o60666, os.makedev(254, 0))
""",
    ),
    "terminal": Hostile(
        "terminal", "for file in (0, 1, 2): attempt(fcntl.ioctl, file, 0x5412, b'x')"
    ),
    "calls of other kinds": Hostile(
        "foreign calls",
        "print(failure(libc.syscall(0x40000000 + 39)), failure(libc.syscall(9999)))",
    ),
    "calls of 32 bits": Hostile(
        "foreign calls",
        """
if os.uname().machine != "x86_64": os.abort()
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
code.write(bytes.fromhex("b814000000cd80c3"))  # getpid as a 32-bit program would ask for it
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
print("DONE", ctypes.CFUNCTYPE(ctypes.c_long)(at)())
""",
        KILLED,
    ),
    "system written": Hostile(
        "system files",
        """
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/self/mem"):
    attempt(put, path)
""",
    ),
    "outside read": Hostile(
        "files outside",
        """
for path in ("/etc/shadow", "/etc/passwd", "/dev/mem", "/dev/kmsg", "/proc/1/environ", "/proc/kcore"):
    attempt(get, path)
""",
    ),
}
