"""Reserves a unique user id for each sandbox that root starts.

The kernel's process limits apply per user, so each sandbox needs its own user id. Worker processes
do not communicate with each other, so a worker reserves a user id by locking one byte of a shared
file. The kernel releases the lock when the worker ends, even after a crash. Containers that share
user ids but no files cannot see each other's locks. Each worker therefore chooses at random among
many ids, so two containers rarely choose the same id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from covey.errors import RewardError

_MANY = range(1 << 30, (1 << 30) + (1 << 29))
_FEW = 5_000
_LOWEST, _BELOW_NOBODY = 1_000, 65_000
_NAME = "covey-sandbox-uids"
_FOLDERS = ("/run", "/tmp")


@contextlib.contextmanager
def leased() -> Iterator[int | None]:
    """Yield a user id that no other sandbox has at the same time.

    Yield None if this process cannot change its user id.
    """
    taken = take()
    if taken is None:
        yield None
        return
    uid, file = taken
    try:
        yield uid
    finally:
        # A forked process may hold the file open, so closing it here is not enough.
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, uid))
        os.close(file)


def take() -> tuple[int, int] | None:
    """Reserve a user id, and return the id and the file descriptor of the lock file.

    Raises RewardError if all user ids are reserved, or if no lock file can be opened.
    """
    span = span_here()
    if span is None:
        return None
    file = _open_locks((*_FOLDERS, tempfile.gettempdir()))
    start = secrets.randbelow(len(span))
    for step in range(min(len(span), _FEW)):
        uid = span[(start + step) % len(span)]
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, uid))
            return uid, file
    os.close(file)
    raise RewardError(
        f"sandbox: all {len(span)} user ids for sandboxes are in use; run fewer sandboxes at the "
        "same time"
    )


def span_here() -> range | None:
    """Return the user ids for sandboxes, or None if this process cannot change its user."""
    return None if os.geteuid() != 0 else span_of(_uid_map())


def span_of(uid_map: str) -> range | None:
    """Return the range of user ids for sandboxes, given the content of /proc/self/uid_map.

    >>> span_of("0 0 4294967295").start, span_of("0 100000 65536"), span_of("0 1000 1")
    (1073741824, range(60000, 65000), None)
    """
    for line in uid_map.splitlines():
        first, _, count = map(int, line.split())
        end = first + count
        if first <= _MANY.start and _MANY.stop <= end:
            return _MANY
        high = end if first > _BELOW_NOBODY else min(end, _BELOW_NOBODY)
        low = max(first, _LOWEST, high - _FEW)
        if low < high:
            return range(low, high)
    return None


@cache
def _uid_map() -> str:
    return Path("/proc/self/uid_map").read_text()


def _open_locks(folders: Sequence[str]) -> int:
    """Open the lock file in the first directory where this process can create or open the file."""
    for folder in folders:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(f"{folder}/{_NAME}", flags, 0o600)
        except OSError:
            continue
        found = os.fstat(file)
        if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
            return file
        os.close(file)  # another user who owns it could take every lock
    raise RewardError(
        f"sandbox: cannot create a lock file in any of the folders {', '.join(folders)}; make one "
        "of these folders writable"
    )


def _lock(kind: int, uid: int) -> bytes:
    """Return a `struct flock` that locks or unlocks the lock-file byte of one user id."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, uid, 1, 0)
