"""The metrics of a run's steps as columns, read piece by piece and updated when the file grows.

A request reads the file for at most a fraction of a second. At first, only a sample of the
remaining steps of a long file is read, so that curves appear at once. Later requests continue
reading the file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from covey.errors import RunError
from covey.run.folder import RunFolder
from covey.run.metric_names import current_name
from covey.run.records import STEP, Row, open_file, parse_line

CHUNK = 2**20
"""Number of bytes that are read at a time."""
SAMPLED = 200
"""Number of steps that are sampled from the part of a file that is not read yet."""
Columns = dict[str, np.ndarray]
"""Columns by metric name: float32 arrays [rows], with NaN for a missing number. The column `step`
is float64."""
name_now = lru_cache(maxsize=4096)(current_name)


@dataclass(slots=True)
class StepTable:
    """The metrics of all steps of one run. All methods are safe to call from several threads."""

    path: Path
    """steps.jsonl."""
    pieces: list[Columns] = field(default_factory=list)
    """Steps in order. Each piece of the list is larger than the next piece, so that large pieces
    are rarely copied."""
    notes: list[str] = field(default_factory=list)
    done: bool = False
    _offset: int = 0
    _lines: int = 0
    _inode: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def memory(self) -> int:
        """Number of bytes that the columns use."""
        return sum(column.nbytes for piece in self.pieces for column in piece.values())

    def update(self, seconds: float) -> list[Columns]:
        """Read new lines for some time; return all steps read, and a sample of the others."""
        with self._lock:
            try:
                with open_file(self.path) as file:
                    return self._read(file, time.monotonic() + seconds)
            except RunError as error:
                self.done, self.notes = True, [str(error)]
                return list(self.pieces)

    def _read(self, file: BinaryIO, until: float) -> list[Columns]:
        found = os.fstat(file.fileno())
        if found.st_size < self._offset or found.st_ino != self._inode:
            # A resume truncated the file or replaced it.
            self.pieces, self.notes, self._offset, self._lines = [], [], 0, 0
            self._inode = found.st_ino
        self.done = False
        while not self.done and time.monotonic() < until:
            file.seek(self._offset)
            piece = file.read(CHUNK)
            while piece and b"\n" not in piece and (more := file.read(CHUNK)):
                piece += more
            whole = piece[: piece.rfind(b"\n") + 1]
            self.done = self._offset + len(whole) >= found.st_size or not whole
            self._add(whole.split(b"\n")[:-1])
            self._offset += len(whole)
        rest = [] if self.done else sampled(file, self._offset, found.st_size)
        return [*self.pieces, *([columns_of(rest)] if rest else [])]

    def _add(self, lines: Sequence[bytes]) -> None:
        rows = []
        for number, raw in enumerate(lines, start=self._lines + 1):
            row = step_row(raw)
            if row is None:
                self._note(parse_line(self.path, number, raw, STEP).problem)
            else:
                rows.append(row)
        self._lines += len(lines)
        if not rows:
            return
        new = columns_of(rows)
        before = self.pieces[-1]["step"][-1:] if self.pieces else new["step"][:0]
        if (np.diff(np.concatenate([before, new["step"]])) <= 0).any():
            # Steps out of order are rare. Read the whole file in the same way as other commands.
            self.notes = []
            self.pieces = [columns_of(RunFolder(self.path.parent).steps(self._note))]
            return
        self.pieces.append(new)
        while len(self.pieces) > 1 and len(self.pieces[-2]["step"]) < 2 * len(new["step"]):
            new = joined(self.pieces[-2], new)
            self.pieces[-2:] = [new]

    def _note(self, text: str) -> None:
        if text and len(self.notes) < 5:
            self.notes.append(text)


def step_row(raw: bytes) -> Row | None:
    """Parse a line as a row with current metric names; None if it is not a step."""
    try:
        row = from_json(raw, allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {name_now(name): value for name, value in row.items()}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Convert rows of metrics to columns. Values that are not numbers become NaN."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {
        name: np.array([_number(row.get(name)) for row in rows], dtype=np.float32) for name in names
    }
    if rows:
        columns["step"] = np.array([row["step"] for row in rows], dtype=np.float64)
    return {name: column for name, column in columns.items() if not np.isnan(column).all()}


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else np.nan


def joined(first: Columns, then: Columns) -> Columns:
    """Join two tables. If one table lacks a metric, its rows get NaN for this metric."""
    return {name: column([first, then], name) for name in {**first, **then}}


def column(pieces: Sequence[Columns], name: str) -> np.ndarray:
    """Return a metric of all steps."""
    parts = [
        piece[name] if name in piece else np.full(len(piece["step"]), np.nan, dtype=np.float32)
        for piece in pieces
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sampled(file: BinaryIO, start: int, stop: int) -> list[Row]:
    """Return evenly spaced steps of the unread part of a file, including the last step."""
    rows: dict[int, Row] = {}
    for place in np.linspace(start, max(start, stop - CHUNK // 16), SAMPLED).astype(int):
        file.seek(place)
        if place != start:
            file.readline(CHUNK)
        row = step_row(file.readline(CHUNK))
        if row is not None:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def curve(
    pieces: Sequence[Columns],
    name: str,
    points: int,
    *,
    axis: str = "step",
    between: tuple[float, float] = (-np.inf, np.inf),
) -> dict[str, Any]:
    """Return a metric as at most `points` points: mean, lowest and highest of each interval."""
    steps, values = (column(pieces, each).astype(np.float64) for each in (axis, name))
    keep = ~np.isnan(values) & (steps >= between[0]) & (steps <= between[1])
    steps, values = steps[keep], values[keep]
    if not len(steps):
        return {"x": [], "mean": []}
    width = -(-len(steps) // points)
    starts = np.arange(0, len(steps), width)
    counts = np.diff([*starts, len(steps)])
    found = {
        "x": _short(np.add.reduceat(steps, starts) / counts),
        "mean": _short(np.add.reduceat(values, starts) / counts),
    }
    if width > 1:
        found["low"] = _short(np.minimum.reduceat(values, starts))
        found["high"] = _short(np.maximum.reduceat(values, starts))
    return found


def _short(values: np.ndarray) -> list[float]:
    """Round numbers to seven digits, the precision of float32."""
    return [float(f"{value:.7g}") for value in values.tolist()]


class StepTables:
    """The tables of many runs.

    If the tables exceed a memory limit, the least recently used tables are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._tables: dict[Path, StepTable] = {}
        self._lock = threading.Lock()

    def __getitem__(self, run: Path) -> StepTable:
        with self._lock:
            table = self._tables.pop(run, None) or StepTable(run / "steps.jsonl")
            self._tables[run] = table  # last: the most recently used
            self._drop(list(self._tables)[:-1])
            return table

    def _drop(self, oldest: Iterable[Path]) -> None:
        total = sum(table.memory for table in self._tables.values())
        for path in oldest:
            if total <= self.most_bytes:
                return
            total -= self._tables.pop(path).memory
