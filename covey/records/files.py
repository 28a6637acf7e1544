"""Atomic writes: a file or a folder is either complete or does not exist."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from covey.errors import DiskError, RunError, reason
from covey.records.records import read_text


def check_free(path: Path, instead: str = "choose another folder") -> None:
    """Raise RunError if an output folder already contains files."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path} already contains files; {instead}")


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line; if the write fails, restore the file's earlier length."""
    data = (json.dumps(row) + "\n").encode()
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(28, os.strerror(28))
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise _failed(path, error) from None


def finite(value: Any) -> Any:
    """Return nested data with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of ASCII JSON. Values without a JSON type become strings."""
    with suppress(ValueError):  # raised for a lone surrogate, which UTF-8 cannot encode
        # This is six times as fast as the json module, and a step writes all its tokens and
        # log-probs.
        line = to_json(row, inf_nan_mode="constants", fallback=str)
        if line.isascii():
            return line + b"\n"
    return (json.dumps(row, default=str) + "\n").encode()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: write it under a temporary name, then rename it."""
    with _partial(path) as partial:
        partial.write_bytes(data)
        sync(partial)
        partial.replace(path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename the folder when all its files are on disk."""
    with _partial(path) as partial:
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.rglob("*"), partial]:
            sync(file)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        sync(path.parent)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial")
    try:
        _remove(partial)
        yield partial
    except BaseException as error:
        _remove(partial)
        if isinstance(error, OSError):
            raise _failed(path, error) from None
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _failed(path: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {path}: {error.strerror or error}")


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# SHA-256 digests of checkpoints, to detect damage.


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
