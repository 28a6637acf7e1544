"""Writing files so that they are either whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.errors import DiskError, RunError


def _failed(path: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {path}: {error.strerror or error}")


def check_free(path: Path, instead: str = "choose another folder") -> None:
    """Refuse a folder to be made that holds something; it may be there and empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path} already holds files; {instead}")


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line; if that fails, take back what was written of it."""
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


def write_text(path: Path, text: str) -> None:
    """Write a file under another name, then rename it into place."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under another name, then rename it into place."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _failed(path, error) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill; it gets its name only when all its files are safely on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.rglob("*"), partial]:
            sync(file)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _failed(path, error) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
