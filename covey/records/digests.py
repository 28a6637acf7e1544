"""SHA-256 digests of checkpoints, to detect damage.

A checkpoint has the digests of its files in SHA256SUMS, which `sha256sum -c SHA256SUMS` can check.
Checkpoints of older Covey versions have no SHA256SUMS and are not checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from covey.errors import RunError, reason
from covey.records.files import sync
from covey.records.records import read_text

DIGESTS_FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_digests(folder: Path) -> None:
    """Write the digests of all files in a folder, and wait until the files are on disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # the system writes to disk while the digests are computed
        synced = [pool.submit(sync, file) for file in files]
        digests = list(pool.map(_sha256, files))
        for each in synced:
            each.result()
    lines = [f"{d}  {f.relative_to(folder)}\n" for f, d in zip(files, digests, strict=True)]
    (folder / DIGESTS_FILE).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path, but: Collection[str] = ()) -> str | None:
    """Return a message about a damaged file of a checkpoint, or None if no file is damaged.

    The files in `but` are not checked.
    """
    if not folder.is_dir():
        return f"{folder} is not a folder"
    listed = folder / DIGESTS_FILE
    if not listed.exists() and not listed.is_symlink():
        return None
    try:
        saved = _read(listed)
    except ValueError as error:
        return f"{listed} is damaged: {reason(error)}"
    except RunError as error:
        return f"{listed} is damaged: {error}"
    checked = [(folder / name, digest) for name, digest in saved.items() if name not in but]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: _difference(*pair), checked)
        return next((problem for problem in found if problem is not None), None)


def _read(listed: Path) -> dict[str, str]:
    if not listed.is_file():
        raise ValueError("it is not a file")
    saved = {}
    for number, line in enumerate(read_text(listed).splitlines(), start=1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not a digest")
        saved[match[2]] = match[1]
    if not saved:
        raise ValueError("it is empty")
    return saved


def _difference(file: Path, saved: str) -> str | None:
    if not file.exists():
        return f"{file} is missing"
    try:
        if not file.is_file():
            return f"{file} is damaged: it is not a file"
        same = _sha256(file) == saved
    except OSError as error:
        return f"{file} is damaged: {reason(error)}"
    return None if same else f"{file} is damaged: its digest differs from the saved one"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
