"""The system calls that the sandbox refuses, as a filter for the kernel (classic BPF).

Namespaces and limits keep a program in; this closes what they leave open. Sockets of some kinds
are not part of a network namespace. Memory can be had where no limit counts it: in nameless
files, System V memory, or a file system mounted in a user namespace of one's own. And much of the
kernel that no ordinary program needs is better not reached at all.
"""

from __future__ import annotations

import platform
import struct
from functools import cache

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_NEW_NAMESPACES = 0x7E020080
_TTY_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal for its owner."""

# name: (number on x86-64, number on the machines that share the kernel's generic table)
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1), "riscv64": (0xC00000F3, 1)}


@cache
def filter_program(machine: str = "") -> bytes | None:
    """Return the filter for a machine, this one unless named; None for one that is not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:
        # The x32 calls are the same calls under other numbers.
        steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for numbers in _REFUSED.values():
        steps += _refuse(numbers[column], _EPERM)
    # Its flags are out of a filter's sight; without it the C library takes `clone`.
    steps += _refuse(_CLONE3[column], _ENOSYS)
    steps += [
        (_EQUAL, 0, 5, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_AND, 0, 0, _NEW_NAMESPACES),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _IOCTL[column]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_EQUAL, 1, 0, _TTY_INPUT[0]),
        (_EQUAL, 0, 1, _TTY_INPUT[1]),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _refuse(number: int, error: int) -> list[tuple[int, int, int, int]]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
