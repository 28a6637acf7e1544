"""The bubblewrap command line that isolates a process.

For an ordinary user, bubblewrap creates a user namespace, in which the kernel counts processes
separately. Process limits do not apply to root, even in a user namespace. If Covey runs as root,
the harness therefore switches to a separate user id, without a user namespace. If the harness
starts as root, bubblewrap drops all capabilities except CAP_SETUID and CAP_SETGID. Each sandbox
needs its own user id, because the kernel's process limit counts all processes of a user on the
machine. In a container where root cannot switch to another user id, Covey treats root as an
ordinary user.
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
    # Thread pools and per-thread memory arenas would reach the limits for no benefit.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")
"""Device files in the sandbox. There is no /dev/zero, because no limit counts the memory of its
shared mappings."""
_LAST_PIECE = 64 << 10
"""Maximum bytes that a socket may store beyond the size of its buffer."""
_ENTER = """
{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
[ -z "$1" ] || echo $$ >"$1/cgroup.procs" || exit 1
shift
exec "$@"
"""


def interpreter() -> str:
    """Return the real path of the Python interpreter, not its link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_folders() -> list[str]:
    """Return the directories of installed packages, which programs may import."""
    paths = sysconfig.get_paths()
    return sorted({os.path.realpath(paths[name]) for name in ("purelib", "platlib")})


def package_places() -> list[str]:
    """Return the path inside the sandbox of each directory that `package_folders` returns."""
    return [f"/packages/{number}" for number in range(len(package_folders()))]


def command(file_bytes: int) -> list[str]:
    """Return the bubblewrap command line, to which the caller appends the command to isolate.

    The command line does not contain the seccomp filter, which bubblewrap reads from a file
    descriptor.
    """
    program = shutil.which("bwrap") or "bwrap"
    return [program, *_namespaces(), *_file_system(), *_own_files(file_bytes)]


def entering(group: Path | None) -> list[str]:
    """Return a command prefix that moves the process into a cgroup before the command starts.

    The prefix also makes the sandbox the first target of the OOM killer. Programs cannot change
    their OOM priority, because /proc is read-only in the sandbox.
    """
    return ["/bin/sh", "-c", _ENTER, "sh", str(group or "")]


@cache
def socket_bytes() -> int:
    """Return the maximum kernel memory for the unread data of one socket."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text()) + _LAST_PIECE
    return 212_992 + _LAST_PIECE


def own_uid() -> int | None:
    """Reserve a user id until this process ends, or return None if Covey cannot change user ids.

    For a sandbox that ends before this process, use `uids.leased`.
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
    """Return bubblewrap options that mount, read-only, only the files that Python needs."""
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
    """Return bubblewrap options that mount packages under names that hide their location."""
    arguments = _parents(package_places()[0])
    hidden = []
    for folder, place in zip(package_folders(), package_places(), strict=True):
        arguments += ["--ro-bind", folder, place]
        also = [folder] if any(Path(folder).is_relative_to(s) for s in seen) else []
        # Hide Covey itself: it ships the solutions of its tasks.
        hidden += [f"{f}/covey" for f in (place, *also) if os.path.isdir(f"{folder}/covey")]
    for folder in hidden:
        arguments += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    return arguments


def _parents(path: str) -> list[str]:
    """Return bubblewrap options that create the parent directories of a path for all users.

    By default, bubblewrap makes directories unreadable for other users.
    """
    folders = [str(folder) for folder in reversed(Path(path).parents)][1:]
    return [part for folder in folders for part in ("--perms", "0755", "--dir", folder)]


def _own_files(file_bytes: int) -> list[str]:
    """Return bubblewrap options that mount a private /proc, /dev and temporary directory."""
    arguments = ["--proc", "/proc", *_parents("/dev/null")]
    # Hide the directory of process 1, which gives access to the memory of the harness.
    arguments += ["--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    arguments += ["--remount-ro", "/proc"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    arguments += ["--symlink", "/proc/self/fd", "/dev/fd"]
    arguments += ["--perms", "1777", "--size", str(file_bytes), "--tmpfs", PLACE]
    # Shared memory counts against the same limit. Everything else is read-only.
    arguments += ["--symlink", PLACE, "/dev/shm", "--remount-ro", "/", "--chdir", PLACE]
    return arguments
