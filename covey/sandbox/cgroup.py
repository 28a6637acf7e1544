"""A control group (cgroup, version 2) for each sandbox, where groups can be had.

The kernel then counts all memory of a sandbox, its own for pipes, sockets and files included, at
every moment. Without one the harness looks at what it can see, now and then.

Groups can be had where a folder of the hierarchy may be written and hands down the controllers of
memory and processes: by root, or in a part that was delegated
(`systemd-run --user --scope -p Delegate=yes covey ...`).
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
"""Bytes for the harness, the interpreter's files and the kernel's own bookkeeping."""
_HELPERS = 4
"""Processes beside the program's: bubblewrap, the harness, and one that either may be starting."""
_REMOVE_SECONDS = 1.0
_numbers = itertools.count()


@contextlib.contextmanager
def group(limits: Limits, parent: Path | None) -> Iterator[Path | None]:
    """Make a group for one sandbox and remove it afterwards, with all that is in it.

    Raises RewardError where that fails in a folder that was found fit for it.
    """
    if parent is None:
        yield None
        return
    try:
        folder, lock = _make(parent)
    except OSError as error:
        raise RewardError(f"sandbox: no cgroup could be made: {error}") from None
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
        raise RewardError(f"sandbox: a cgroup could not be limited: {error}") from None


def settings(limits: Limits) -> dict[str, str]:
    """What is written into which file of a group."""
    return {
        "memory.max": str(limits.memory_bytes + limits.file_bytes + _OVERHEAD),
        "memory.swap.max": "0",
        "pids.max": str(limits.processes + _HELPERS),
        "cpu.max": "100000 100000",  # one core's worth: microseconds in each period of so many
    }


@cache
def parent_here() -> Path | None:
    """Return the folder for this machine's groups; None where there is none."""
    try:
        found = find_parent(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
        if found is not None:
            sweep(found)
            with group(Limits(), found):  # a trial
                pass
    except (OSError, RewardError):
        return None
    return found


def find_parent(mountinfo: str, membership: str) -> Path | None:
    """Find a folder in which groups can be made that are limited, from our own group upwards.

    A group above is used only where none on the way has a limit: leaving it would undo that.
    """
    own = own_folder(mountinfo, membership)
    if own is None:
        return None
    mount, folder = own
    while True:
        if _hands_down(folder) or (folder == own[1] and _open_up(folder)):
            return folder if os.access(folder, os.W_OK) else None
        if folder == mount or _is_limited(folder):
            return None
        folder = folder.parent


def own_folder(mountinfo: str, membership: str) -> tuple[Path, Path] | None:
    """Return where the hierarchy is mounted, and the folder of our own group in it."""
    paths = [line[3:] for line in membership.splitlines() if line.startswith("0::")]
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        if after.split()[0] == "cgroup2" and paths and Path(paths[0]).is_relative_to(root):
            return Path(mount), Path(mount, os.path.relpath(paths[0], root))
    return None


def _hands_down(folder: Path) -> bool:
    return set((folder / "cgroup.subtree_control").read_text().split()) >= _NEEDED


def _is_limited(folder: Path) -> bool:
    files = [folder / "memory.max", folder / "pids.max", folder / "cpu.max"]
    return any(file.exists() and file.read_text().split()[0] != "max" for file in files)


def _open_up(folder: Path) -> bool:
    """Have a group hand down controllers. It may hold no processes then, unless it is the root.

    So those that it holds go into a group below, if all of them are of our own session.
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
    for _ in range(10):  # a process that is being moved may have started another
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
    """Whether a process is of our session, or gone. It is 0 if it is not in our namespace."""
    try:
        return pid != "0" and os.getsid(int(pid)) == os.getsid(0)
    except ProcessLookupError:
        return True


def _make(parent: Path) -> tuple[Path, int]:
    """Make a group; the lock on its folder tells others that its owner is alive."""
    while True:
        folder = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}-{time.monotonic_ns()}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # swept before it could be locked
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def sweep(parent: Path) -> list[str]:
    """Remove the groups of owners that are gone; return their names."""
    swept = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or of another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
            swept.append(folder.name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
    return swept


def remove(folder: Path) -> None:
    """Kill what is left in a group and remove it. One that resists is left to a later sweep."""
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
    """Write into a file of the kernel's, which an optional controller may not have made."""
    optional = ("cpu.max", "memory.swap.max", "cgroup.kill")
    if file.name in optional and not file.exists():
        return
    with open(file, "r+") as opened:
        opened.write(text)
