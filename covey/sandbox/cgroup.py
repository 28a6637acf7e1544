"""A control group (cgroup v2) for each sandbox, on machines where Covey may create cgroups.

With a cgroup, the kernel counts all memory of a sandbox, including kernel memory for pipes, sockets
and files. Without a cgroup, the harness polls the memory of the processes in the sandbox.

To make a cgroup, Covey needs a writable directory in the cgroup hierarchy, with delegated memory
and pids controllers. Root can usually write to the cgroup hierarchy. Other users can get a writable
directory if they start Covey in a delegated scope, with `systemd-run --user --scope -p Delegate=yes
covey ...`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from covey.errors import RewardError
from covey.sandbox.limits import Limits

_NEEDED = {"memory", "pids"}
_WANTED = {*_NEEDED, "cpu"}
_PREFIX = "covey-run-"
_MAIN = "covey-main"
_OVERHEAD = 64 << 20
"""Bytes added to a sandbox's memory limit, for the harness, interpreter files and kernel data
structures."""
_HELPERS = 4
"""Number of processes in a sandbox's cgroup that are not part of the untrusted program: bubblewrap,
the harness, and one child process of each.
"""
_REMOVE_SECONDS = 1.0
_numbers = itertools.count()


@contextlib.contextmanager
def group(limits: Limits, parent: Path | None) -> Iterator[Path | None]:
    """Make a cgroup for a sandbox. On exit, kill the sandbox's processes and remove the cgroup.

    Raises RewardError if the cgroup cannot be made.
    """
    if parent is None:
        yield None
        return
    try:
        folder, lock = _make(parent)
    except OSError as error:
        raise RewardError(f"sandbox: cannot create a cgroup: {error}") from None
    try:
        _limit(folder, limits)
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _limit(folder: Path, limits: Limits) -> None:
    try:
        for name, text in settings(limits).items():
            _set(folder / name, text)
    except OSError as error:
        raise RewardError(f"sandbox: cannot set the limits of a cgroup: {error}") from None


def settings(limits: Limits) -> dict[str, str]:
    """Return a dict {file name: text to write} for the control files of a cgroup."""
    return {
        "memory.max": str(limits.memory_bytes + limits.file_bytes + _OVERHEAD),
        "memory.swap.max": "0",
        "pids.max": str(limits.processes + _HELPERS),
        "cpu.max": "100000 100000",  # one core: microseconds of CPU time per period in microseconds
    }


@cache
def parent_here() -> Path | None:
    """Return the directory in which Covey can make cgroups, or None if no directory is usable."""
    try:
        found = find_parent(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
        if found is not None:
            sweep(found)
            with group(Limits(), found):  # test whether a group can be made
                pass
    except (OSError, RewardError):
        return None
    return found


def find_parent(mountinfo: str, membership: str) -> Path | None:
    """Return a usable directory for new cgroups: this process's cgroup or one of its parents.

    The search through the parents stops at the first cgroup that has limits, because a process that
    leaves this cgroup would escape the limits.
    """
    own = own_folder(mountinfo, membership)
    if own is None:
        return None
    mount, folder = own
    while True:
        if _delegates(folder) or (folder == own[1] and _enable_controllers(folder)):
            return folder if os.access(folder, os.W_OK) else None
        if folder == mount or _is_limited(folder):
            return None
        folder = folder.parent


def own_folder(mountinfo: str, membership: str) -> tuple[Path, Path] | None:
    """Return the mount point of cgroups and the directory of this process's own cgroup."""
    paths = [line[3:] for line in membership.splitlines() if line.startswith("0::")]
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        if after.split()[0] == "cgroup2" and paths and Path(paths[0]).is_relative_to(root):
            return Path(mount), Path(mount, os.path.relpath(paths[0], root))
    return None


def _delegates(folder: Path) -> bool:
    return set((folder / "cgroup.subtree_control").read_text().split()) >= _NEEDED


def _is_limited(folder: Path) -> bool:
    files = [folder / "memory.max", folder / "pids.max", folder / "cpu.max"]
    return any(file.exists() and file.read_text().split()[0] != "max" for file in files)


def _enable_controllers(folder: Path) -> bool:
    """Enable the memory, pids and cpu controllers for the children of a cgroup.

    Only the root cgroup may both contain processes and delegate controllers. If the cgroup is not
    the root cgroup, its processes are first moved to a child cgroup. No process is moved if any
    process of the cgroup belongs to a different session than this process.
    """
    offered = set((folder / "cgroup.controllers").read_text().split())
    if not offered >= _NEEDED or not os.access(folder / "cgroup.subtree_control", os.W_OK):
        return False
    is_root = not (folder / "cgroup.type").exists()
    try:
        if not is_root and not _move_down(folder):
            return False
        _set(folder / "cgroup.subtree_control", " ".join(f"+{n}" for n in offered & _WANTED))
    except OSError:
        return False
    return True


def _move_down(folder: Path) -> bool:
    below = folder / _MAIN
    for _ in range(10):  # a process may fork while it is moved
        members = (folder / "cgroup.procs").read_text().split()
        if not members:
            return True
        if not all(map(_is_of_our_session, members)):
            return False
        below.mkdir(exist_ok=True)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                _set(below / "cgroup.procs", pid)
    return False


def _is_of_our_session(pid: str) -> bool:
    """Return whether a process has ended or belongs to the session of this process.

    The kernel shows pid 0 for a process in another pid namespace.
    """
    try:
        return pid != "0" and os.getsid(int(pid)) == os.getsid(0)
    except ProcessLookupError:
        return True


def _make(parent: Path) -> tuple[Path, int]:
    """Make a cgroup, and lock its directory, so that `sweep` does not remove the cgroup."""
    while True:
        folder = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}-{time.monotonic_ns()}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process removed it before we locked it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def sweep(parent: Path) -> list[str]:
    """Remove the cgroups whose owner process is dead, and return their names."""
    swept = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # gone, or owned by another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
            swept.append(folder.name)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(lock)
    return swept


def remove(folder: Path) -> None:
    """Kill all processes of a cgroup and remove the cgroup.

    If the cgroup cannot be removed now, a later `sweep` removes the cgroup.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    with contextlib.suppress(OSError):
        _set(folder / "cgroup.kill", "1")
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        else:
            return


def _set(file: Path, text: str) -> None:
    """Write to a control file of a cgroup, but ignore a missing optional file."""
    optional = ("cpu.max", "memory.swap.max", "cgroup.kill")
    if file.name in optional and not file.exists():
        return
    with open(file, "r+") as opened:
        opened.write(text)
