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

from covey.sandbox.syscalls import ALLOWED, CHECKED, MISSING, NEWER, numbers

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
