"""Reading what a run left: whatever a disk, a crash or an editor has made of it.

A line that cannot be used is left out and told of in one line that names file and line; all others
are read. What a reader needs all of, it reads with `read_lines`, which refuses such a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from covey.errors import RunError, reason

Note = Callable[[str], None]
Shape = TypeAdapter[Any]
ANY_OBJECT: Shape = TypeAdapter(dict[str, Any])


def to_stderr(text: str) -> None:
    """Say something that the user should know, beside what a command prints."""
    print(f"covey: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file: what it holds, or why that cannot be used."""

    raw: bytes
    row: dict[str, Any] | None
    problem: str = ""


def read_bytes(path: Path) -> bytes:
    """Return what a file holds. RunError if it is none: a pipe, say, would never end."""
    try:
        if not path.is_file():
            raise RunError(f"{path} cannot be read: it is {_instead(path)}")
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None


def _instead(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "not an ordinary file" if path.exists() else "not there"


def is_missing(path: Path) -> bool:
    """Whether nothing has that name, not even a link that leads nowhere."""
    return not path.exists() and not path.is_symlink()


def scan_lines(path: Path, shape: Shape = ANY_OBJECT) -> list[Line]:
    """Read JSON lines, good and bad. A last line that was never finished is not one of them."""
    if is_missing(path):
        return []
    *whole, last = read_bytes(path).split(b"\n")
    lines = [_line(path, number, raw, shape) for number, raw in enumerate(whole, start=1)]
    unfinished = _line(path, len(whole) + 1, last, shape)
    return lines if unfinished.row is None else [*lines, unfinished]


def _line(path: Path, number: int, raw: bytes, shape: Shape) -> Line:
    try:
        return Line(raw, _checked(raw, shape))
    except ValueError as error:
        return Line(raw, None, f"{path} line {number} cannot be read: {error}")


def _checked(raw: bytes, shape: Shape) -> dict[str, Any]:
    """Return a JSON object of some shape. ValueError, with the reason in a few words, if not."""
    try:
        # JSON has no NaN: what is not finite is null.
        row: dict[str, Any] = json.loads(raw.decode("utf-8"), parse_constant=lambda name: None)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    try:
        shape.validate_python(row)
    except ValidationError as error:
        raise ValueError(_explained(error)) from None
    return row


def _explained(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}: {message}" if where else message


def read_lines(path: Path, shape: Shape = ANY_OBJECT) -> list[dict[str, Any]]:
    """Read JSON lines, leaving out a last line that a killed process did not finish.

    RunError if another line is not what it should be.
    """
    rows = []
    for line in scan_lines(path, shape):
        if line.row is None:
            raise RunError(line.problem)
        rows.append(line.row)
    return rows


def usable_lines(path: Path, shape: Shape, note: Note) -> list[dict[str, Any]]:
    """Read the lines that can be used, and tell of the others in one line."""
    try:
        lines = scan_lines(path, shape)
    except RunError as error:
        note(str(error))
        return []
    bad = [line.problem for line in lines if line.row is None]
    if bad:
        more = f" ({len(bad)} lines are)" if len(bad) > 1 else ""
        note(f"{bad[0]}; it is left out{more}")
    return [line.row for line in lines if line.row is not None]


def by_step(path: Path, rows: list[dict[str, Any]], note: Note) -> list[dict[str, Any]]:
    """Return rows with each step once and in order, which a run folder that is well has anyway."""
    last = {row["step"]: row for row in rows}
    ordered = [last[step] for step in sorted(last)]
    if ordered != rows:
        note(f"{path}: steps come twice or out of order; of each the last line counts")
    return ordered


def read_object(path: Path, shape: Shape = ANY_OBJECT) -> dict[str, Any]:
    """Read a file that holds one JSON object. RunError if it does not."""
    data = read_bytes(path)
    try:
        return _checked(data, shape)
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}") from None
