"""Atomic writes: a file or a folder is either complete or does not exist."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from covey.errors import DiskError, RunError


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
    """Write a UTF-8 file atomically."""
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
    """Yield a temporary path beside `path`, and remove it after an error."""
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
