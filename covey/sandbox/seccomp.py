"""The seccomp filter (classic BPF), which limits the system calls of a sandboxed program.

The filter blocks system calls that namespaces and resource limits do not block. The filter is an
allow-list, so every system call that is not listed fails. For example, a program cannot use network
sockets, or kernel features that programs do not need. The filter also blocks every kind of memory
that no resource limit counts: memfd, System V objects, message queues and anonymous shared memory.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from functools import cache

# The allow-list of system calls for sandboxed programs.


ALLOWED = """
# files
read=0/63 write=1/64 open=2/- close=3/57 stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79
statx=332/291 lseek=8/62 pread64=17/67 pwrite64=18/68 readv=19/65 writev=20/66 preadv=295/69
pwritev=296/70 preadv2=327/286 pwritev2=328/287 access=21/- faccessat=269/48 faccessat2=439/439
openat=257/56 creat=85/- truncate=76/45 ftruncate=77/46 fallocate=285/47 fadvise64=221/223
getdents=78/- getdents64=217/61 getcwd=79/17 chdir=80/49 fchdir=81/50 rename=82/- renameat=264/38
renameat2=316/276 mkdir=83/- mkdirat=258/34 rmdir=84/- link=86/- linkat=265/37 unlink=87/-
unlinkat=263/35 symlink=88/- symlinkat=266/36 readlink=89/- readlinkat=267/78 chmod=90/-
fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 chown=92/- fchown=93/55 lchown=94/- fchownat=260/54
umask=95/166 utime=132/- utimes=235/- utimensat=280/88 futimesat=261/- mknod=133/- mknodat=259/33
statfs=137/43 fstatfs=138/44 fsync=74/82 fdatasync=75/83 sync_file_range=277/84
getxattr=191/8 lgetxattr=192/9 fgetxattr=193/10 listxattr=194/11 llistxattr=195/12
flistxattr=196/13 copy_file_range=326/285 sendfile=40/71 dup=32/23 dup2=33/- dup3=292/24
close_range=436/436
# waiting and pipes
poll=7/- ppoll=271/73 select=23/- pselect6=270/72 epoll_create=213/- epoll_create1=291/20
epoll_ctl=233/21 epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441 pipe=22/- pipe2=293/59
eventfd=284/- eventfd2=290/19 signalfd=282/- signalfd4=289/74 timerfd_create=283/85
timerfd_settime=286/86 timerfd_gettime=287/87 sendto=44/206 recvfrom=45/207 sendmsg=46/211
recvmsg=47/212 shutdown=48/210 getsockname=51/204 getpeername=52/205 getsockopt=55/209
# memory
brk=12/214 munmap=11/215 mprotect=10/226 mremap=25/216 msync=26/227 madvise=28/233
get_mempolicy=239/236 membarrier=324/283 riscv_flush_icache=-/259
# processes and threads
fork=57/- vfork=58/- execve=59/221 execveat=322/281 exit=60/93 exit_group=231/94 wait4=61/260
waitid=247/95 getpid=39/172 getppid=110/173 gettid=186/178 getpgrp=111/- getpgid=121/155
setpgid=109/154 getsid=124/156 setsid=112/157 pidfd_open=434/434 pidfd_send_signal=424/424
kill=62/129 tkill=200/130 tgkill=234/131 futex=202/98 set_tid_address=218/96
set_robust_list=273/99 rseq=334/293 arch_prctl=158/- sched_yield=24/124 sched_getaffinity=204/123
sched_getattr=315/275 sched_getparam=143/121 sched_getscheduler=145/120
sched_get_priority_max=146/125 sched_get_priority_min=147/126 sched_rr_get_interval=148/127
getpriority=140/141 getcpu=309/168 restart_syscall=219/128 riscv_hwprobe=-/258
# users and limits; the setters are for the harness, programs lack the capability
getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177 getgroups=115/158 getresuid=118/148
getresgid=120/150 setgroups=116/159 setresuid=117/147 setresgid=119/149 getrlimit=97/163
setrlimit=160/164 getrusage=98/165
# signals
rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136
rt_sigtimedwait=128/137 rt_sigsuspend=130/133 rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240
sigaltstack=131/132 pause=34/-
# time and randomness
time=201/- gettimeofday=96/169 clock_gettime=228/113 clock_getres=229/114 clock_nanosleep=230/115
nanosleep=35/101 alarm=37/- getitimer=36/102 setitimer=38/103 timer_create=222/107
timer_settime=223/110 timer_gettime=224/108 timer_getoverrun=225/109 timer_delete=226/111
times=100/153 getrandom=318/278 uname=63/160 sysinfo=99/179
"""
CHECKED = """
clone=56/220 mmap=9/222 ioctl=16/29 prctl=157/167 prlimit64=302/261 setpriority=141/140
sched_setaffinity=203/122 sched_setattr=314/274 sched_setparam=142/118 sched_setscheduler=144/119
socketpair=53/199 fcntl=72/25 flock=73/32
"""
"""System calls allowed only with certain argument values."""
MISSING = """
clone3=435/435 openat2=437/437 futex_waitv=449/449 set_mempolicy_home_node=450/450
"""
"""New system calls, which fail with ENOSYS so that the C library uses an older call."""
NEWER = 453
"""A system call with this number or a higher number fails with ENOSYS."""


def numbers(table: str, column: int) -> dict[str, int]:
    """Return the number of each system call in a table.

    Column 0 has the numbers of x86-64, and column 1 has the numbers of the generic table.

    >>> numbers("open=2/- close=3/57", 1)
    {'close': 57}
    """
    lines = [line for line in table.splitlines() if not line.startswith("#")]
    pairs = [entry.split("=") for entry in " ".join(lines).split()]
    found = {name: both.split("/")[column] for name, both in pairs}
    return {name: int(number) for name, number in found.items() if number != "-"}


Step = tuple[int, int, int, int]

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_DONE, _EPERM, _ENOSYS = 0x00050000, 0x00050000 | 1, 0x00050000 | 38
"""Results of a call that is not made: success, or an error number."""
_LOAD, _EQUAL, _ABOVE, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_NEW_NAMESPACES = 0x7E020080
_ANONYMOUS, _KIND_AND_HUGE, _PRIVATE = 0x20, 0x4000F, 0x02
_TERMINAL_AND_FILE = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""The allowed ioctl requests are TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX,
FIOCLEX, TCGETS2."""
_OWN_NAME_AND_STATE = (1, 2, 3, 15, 16, 21, 23, 38, 39, 0x53564D41)
"""The allowed prctl options are PDEATHSIG (set, get), GET_DUMPABLE, NAME (set, get), GET_SECCOMP,
CAPBSET_READ, NO_NEW_PRIVS (set, get), SET_VMA. The option SET_DUMPABLE is not allowed, because it
would let a program hide from the harness. The harness is the process that supervises the
program."""
_LOCKS = (6, 7, 37, 38)
"""The fcntl requests F_SETLK, F_SETLKW, F_OFD_SETLK and F_OFD_SETLKW."""
_LEASES = (1024, 1026)
"""The fcntl requests F_SETLEASE and F_NOTIFY."""
_AF_UNIX, _PRIO_PROCESS, _HARNESS = 1, 0, 1
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1), "riscv64": (0xC00000F3, 1)}


@cache
def filter_program(machine: str = "") -> bytes | None:
    """Return the seccomp filter for an architecture, or None if the architecture is unknown."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    checks = _checks()
    for name, number in numbers(CHECKED, column).items():
        steps += [(_EQUAL, 0, len(checks[name]), number), *checks[name]]
    for first, last in _runs(numbers(ALLOWED, column).values()):
        steps += [(_AT_LEAST, 0, 2, first), (_ABOVE, 1, 0, last), (_RETURN, 0, 0, _ALLOW)]
    for number in numbers(MISSING, column).values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ENOSYS)]
    # The x32 ABI has the same calls under higher numbers, which this also refuses.
    steps += [(_AT_LEAST, 0, 1, NEWER), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _checks() -> dict[str, list[Step]]:
    """Return the BPF instructions that check the arguments of each system call.

    In each list of instructions, every branch ends with a return instruction.
    """
    for_others = [_argument(0), *_unless(_HARNESS)]
    return {
        # No new namespaces, because a program has capabilities there and could attack the kernel.
        "clone": [_argument(0), (_AND, 0, 0, _NEW_NAMESPACES), *_only(0)],
        # Anonymous shared memory belongs to no process: it can outlive every mapping, and then
        # no limit counts it. Huge pages are not counted either.
        "mmap": [
            _argument(3),
            (_AND, 0, 0, _ANONYMOUS),
            (_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            _argument(3),
            (_AND, 0, 0, _KIND_AND_HUGE),
            *_only(_PRIVATE),
        ],
        # No terminal input (TIOCSTI), and no driver-specific requests.
        "ioctl": [_argument(1), *_only(*_TERMINAL_AND_FILE)],
        "prctl": [_argument(0), *_only(*_OWN_NAME_AND_STATE)],
        "socketpair": [_argument(0), *_only(_AF_UNIX)],
        # A lock on a file of the system would hold for the host and for all sandboxes. No other
        # sandbox has this one's own files, so a lock counts as taken without being taken.
        "flock": [(_RETURN, 0, 0, _DONE)],
        "fcntl": [
            _argument(1),
            *(step for at in _LOCKS for step in ((_EQUAL, 0, 1, at), (_RETURN, 0, 0, _DONE))),
            *(step for at in _LEASES for step in ((_EQUAL, 0, 1, at), (_RETURN, 0, 0, _EPERM))),
            (_RETURN, 0, 0, _ALLOW),
        ],
        # The harness has the same user id, so a program could lower its priority and starve it.
        "setpriority": [
            _argument(0),
            (_EQUAL, 1, 0, _PRIO_PROCESS),
            (_RETURN, 0, 0, _EPERM),
            _argument(1),
            *_unless(_HARNESS),
        ],
        "prlimit64": for_others,
        "sched_setaffinity": for_others,
        "sched_setattr": for_others,
        "sched_setparam": for_others,
        "sched_setscheduler": for_others,
    }


def _argument(number: int) -> Step:
    """Return the instruction that loads the low 32 bits of an argument of a system call.

    In the system calls whose arguments are checked, only the low 32 bits of an argument matter.
    """
    return (_LOAD, 0, 0, 16 + 8 * number)


def _only(*values: int) -> list[Step]:
    """Return BPF instructions that allow the system call only for the given argument values."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [*tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _unless(value: int) -> list[Step]:
    """Return BPF instructions that reject one argument value and allow all other values."""
    return [(_EQUAL, 1, 0, value), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]


def _runs(values: Iterable[int]) -> list[tuple[int, int]]:
    """Group integers into consecutive ranges, and return each range's first and last integer."""
    runs: list[tuple[int, int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs
