"""Digests of a checkpoint's files: what was saved can be told from what a disk made of it.

They are in the form that `sha256sum -c SHA256SUMS` checks. A checkpoint of an older version has
none, and is taken as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from covey.errors import reason
from covey.run.files import sync

DIGESTS_FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_digests(folder: Path) -> None:
    """Write the digests of all files in a folder; it is complete only with them.

    Hashing takes no time of its own: it goes on while the system writes the files to disk.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        synced = [pool.submit(sync, file) for file in files]
        digests = list(pool.map(sha256, files))
        for each in synced:
            each.result()
    lines = [f"{d}  {f.relative_to(folder)}\n" for f, d in zip(files, digests, strict=True)]
    (folder / DIGESTS_FILE).write_text("".join(lines), encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path, but: Collection[str] = ()) -> str | None:
    """Say which file of a checkpoint is not what was saved, or None if all are.

    Files named in `but` are not needed, and not looked at.
    """
    if not folder.is_dir():
        return f"{folder} is not a folder"
    listed = folder / DIGESTS_FILE
    if not listed.exists() and not listed.is_symlink():
        return None
    try:
        wanted = _read(listed)
    except (OSError, ValueError) as error:
        return f"{listed} is damaged: {reason(error)}"
    needed = [(folder / name, digest) for name, digest in wanted.items() if name not in but]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: _difference(*pair), needed)
        return next((problem for problem in found if problem is not None), None)


def _read(listed: Path) -> dict[str, str]:
    if not listed.is_file():
        raise ValueError("it is not a file")
    wanted = {}
    for number, line in enumerate(listed.read_text(encoding="utf-8").splitlines(), start=1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not a digest")
        wanted[match[2]] = match[1]
    if not wanted:
        raise ValueError("it is empty")
    return wanted


def _difference(file: Path, wanted: str) -> str | None:
    if not file.exists():
        return f"{file} is missing"
    try:
        if not file.is_file():
            return f"{file} is damaged: it is not a file"
        same = sha256(file) == wanted
    except OSError as error:
        return f"{file} is damaged: {reason(error)}"
    return None if same else f"{file} is damaged: its digest is not the one that was saved"
