"""The filter of system calls, run here as the kernel would run it, for every kind of machine."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from covey.sandbox.seccomp import (
    _MACHINES,
    ALLOWED,
    CHECKED,
    MISSING,
    NEWER,
    filter_program,
    numbers,
)

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def answer(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says about a call."""
    program = filter_program(machine)
    assert program is not None
    steps = list(struct.iter_unpack("=HBBI", program))
    here = _MACHINES[machine][0] if architecture is None else architecture
    data = struct.pack("<iIQ6Q", number, here, 0, *[*arguments, *[0] * 6][:6])
    held = at = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            held &= value
        else:
            at += (
                yes if {0x15: held == value, 0x25: held > value, 0x35: held >= value}[code] else no
            )


@pytest.mark.parametrize("machine", _MACHINES)
def test_listed_calls_pass_and_no_others(machine: str) -> None:
    column = _MACHINES[machine][1]
    allowed = set(numbers(ALLOWED, column).values())
    checked = set(numbers(CHECKED, column).values())
    missing = set(numbers(MISSING, column).values())
    assert not allowed & checked
    assert not missing & (allowed | checked)
    for number in {*range(600), 0x40000000, 0x40000009, 0x7FFFFFFF} - checked:
        wanted = ALLOW if number in allowed else EPERM
        if number in missing or number >= NEWER:
            wanted = ENOSYS
        assert answer(machine, number) == wanted, number
    assert answer(machine, min(allowed), architecture=0x40000003) == KILL


@pytest.mark.parametrize("machine", _MACHINES)
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("clone", [(0x11,), (0x3D0F00,)], [(0x10000011,), (0x20000,), (0x40000000,), (0x80,)]),
        (
            "mmap",
            [(0, 4096, 3, 0x22), (0, 4096, 3, 0x20022), (0, 4096, 1, 0x02), (0, 4096, 3, 0x01)],
            [(0, 4096, 3, 0x21), (0, 4096, 3, 0x23), (0, 4096, 3, 0x40022), (0, 4096, 3, 0x28)],
        ),
        ("ioctl", [(0, 0x5401), (1, 0x5421)], [(0, 0x5412), (0, 0x541C), (0, 0)]),
        ("prctl", [(15,), (16,)], [(4,), (22,), (8,)]),
        ("socketpair", [(1,)], [(2,), (16,), (40,)]),
        ("setpriority", [(0, 0, 5), (0, 7, 5)], [(0, 1, 5), (1, 0, 5), (2, 0, 5)]),
        ("prlimit64", [(0,), (7,)], [(1,)]),
        ("sched_setaffinity", [(0,), (7,)], [(1,)]),
        ("sched_setattr", [(0,)], [(1,)]),
        ("sched_setparam", [(0,)], [(1,)]),
        ("sched_setscheduler", [(0,)], [(1,)]),
    ],
)
def test_arguments_decide_about_some_calls(
    machine: str, name: str, good: list[tuple[int, ...]], bad: list[tuple[int, ...]]
) -> None:
    number = numbers(CHECKED, _MACHINES[machine][1])[name]
    assert [answer(machine, number, *arguments) for arguments in good] == [ALLOW] * len(good)
    assert [answer(machine, number, *arguments) for arguments in bad] == [EPERM] * len(bad)


@pytest.mark.parametrize("machine", _MACHINES)
def test_locks_count_as_taken_without_being_taken(machine: str) -> None:
    own = numbers(CHECKED, _MACHINES[machine][1])
    done = EPERM - 1  # the error number 0
    assert answer(machine, own["flock"], 3, 2) == done
    assert [answer(machine, own["fcntl"], 3, at) for at in (6, 7, 37, 38)] == [done] * 4
    assert [answer(machine, own["fcntl"], 3, at) for at in (1024, 1026)] == [EPERM] * 2
    assert [answer(machine, own["fcntl"], 3, at) for at in (1, 2, 3, 4, 1030, 1031)] == [ALLOW] * 6


def test_numbers_are_those_of_the_kernel() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    ours = numbers(ALLOWED, 0) | numbers(CHECKED, 0) | numbers(MISSING, 0)
    found = {name: int(known.get(name, number)) for name, number in ours.items()}
    assert found == ours
    assert len(set(ours.values())) == len(ours)
