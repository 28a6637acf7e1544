"""The command that starts a process in isolation: bubblewrap, with all that it can take away.

Not root: bubblewrap makes a user namespace, in which the limit on processes counts on its own.
Root: such limits do not bind root, not even under another name in a user namespace. So there is no
user namespace, bubblewrap leaves just the right to change users, and the harness uses it up: it
becomes a user that nobody else is, because outside of user namespaces the limit counts all
processes of a user wherever they run. Where root has no other user to become, as in some
containers, it is not root to the machine, and is treated as if it were not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path

from covey.sandbox import uids

PLACE = "/tmp"
ENVIRONMENT = {
    "HOME": PLACE,
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    # Pools of threads, and memory kept for each thread, run into the limits for nothing.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")
"""Not zero: mapped as shared it gives memory that belongs to no process, and nothing counts it."""
_LAST_PIECE = 64 << 10
"""A socket takes one more piece as long as it is not full."""
_ENTER = """
{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
[ -z "$1" ] || echo $$ >"$1/cgroup.procs" || exit 1
shift
exec "$@"
"""


def interpreter() -> str:
    """The running Python itself, not the environment that it may run in."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_folders() -> list[str]:
    """Where installed packages lie: programs may import them."""
    paths = sysconfig.get_paths()
    return sorted({os.path.realpath(paths[name]) for name in ("purelib", "platlib")})


def package_places() -> list[str]:
    """Where they lie inside, in the same order."""
    return [f"/packages/{number}" for number in range(len(package_folders()))]


def command(file_bytes: int) -> list[str]:
    """Return the start of a command line; what to isolate follows it.

    The filter of system calls is not part of it: it has to be handed over in an open file.
    """
    program = shutil.which("bwrap") or "bwrap"
    return [program, *_namespaces(), *_file_system(), *_own_files(file_bytes)]


def entering(group: Path | None) -> list[str]:
    """Return what goes before the command, to be in a control group from its first moment.

    Where the machine runs out of memory, a sandbox is also the first to go. Inside, nobody can
    change that: the files of processes are read only.
    """
    return ["/bin/sh", "-c", _ENTER, "sh", str(group or "")]


@cache
def socket_bytes() -> int:
    """The most memory that the kernel holds for what was written into a socket and not read."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text()) + _LAST_PIECE
    return 212_992 + _LAST_PIECE


def own_uid() -> int | None:
    """A user id that no other sandbox has while this process lives; None where we are not root.

    `uids.leased` is for a sandbox that ends sooner.
    """
    taken = uids.take()
    return None if taken is None else taken[0]


def _namespaces() -> list[str]:
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--as-pid-1", "--new-session", "--die-with-parent"]
    arguments += ["--cap-drop", "ALL"]
    if uids.span_here() is not None:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user"]
    arguments += ["--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return arguments


@cache
def _file_system() -> tuple[str, ...]:
    """What is needed to run Python, and nothing else, to be read only."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for file in _SYSTEM_FILES:
        arguments += ["--ro-bind-try", file, file]
    seen = ["/usr"]
    for folder in (os.path.realpath(sys.base_prefix), interpreter()):
        if os.path.exists(folder) and not any(Path(folder).is_relative_to(s) for s in seen):
            arguments += [*_parents(folder), "--ro-bind", folder, folder]
            seen.append(folder)
    return (*arguments, *_packages(seen))


def _packages(seen: list[str]) -> list[str]:
    """Installed packages under names of our own: where they lie is nobody's business."""
    arguments = _parents(package_places()[0])
    hidden = []
    for folder, place in zip(package_folders(), package_places(), strict=True):
        arguments += ["--ro-bind", folder, place]
        also = [folder] if any(Path(folder).is_relative_to(s) for s in seen) else []
        # Beside the packages lies Covey's own, with the answers to the problems that it ships.
        hidden += [f"{f}/covey" for f in (place, *also) if os.path.isdir(f"{folder}/covey")]
    for folder in hidden:
        arguments += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    return arguments


def _parents(path: str) -> list[str]:
    """Folders that lead to a path: those that bubblewrap makes by itself nobody else may enter."""
    folders = [str(folder) for folder in reversed(Path(path).parents)][1:]
    return [part for folder in folders for part in ("--perms", "0755", "--dir", folder)]


def _own_files(file_bytes: int) -> list[str]:
    """Processes, devices and temporary files of its own."""
    arguments = ["--proc", "/proc", *_parents("/dev/null")]
    # The harness is process 1; through its folder its memory could be read and written.
    arguments += ["--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    arguments += ["--remount-ro", "/proc"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    arguments += ["--symlink", "/proc/self/fd", "/dev/fd"]
    arguments += ["--perms", "1777", "--size", str(file_bytes), "--tmpfs", PLACE]
    # Shared memory counts against the same limit. All else, the root folder too, is read only.
    arguments += ["--symlink", PLACE, "/dev/shm", "--remount-ro", "/", "--chdir", PLACE]
    return arguments
