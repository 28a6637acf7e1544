"""The metrics of a run's steps as columns, read piece by piece and kept up to date with the file.

A request reads for a fraction of a second at most. The part of a long file that is not read yet is
sampled, so that its curves are there at once; later requests go on reading.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from covey.errors import RunError
from covey.run.folder import RunFolder
from covey.run.metric_names import current_name
from covey.run.records import STEP, Row, open_file, parse_line

CHUNK = 2**21
"""Bytes that are read at a time."""
SAMPLED = 250
"""Steps that stand for the part of a file that is not read yet."""
Columns = dict[str, np.ndarray]
"""Metric -> float32 [rows], NaN where a step has no number; `step` is float64."""


@dataclass(slots=True)
class StepTable:
    """The steps of one run. All methods are safe to call from several threads."""

    path: Path
    """steps.jsonl."""
    columns: Columns = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    done: bool = False
    _offset: int = 0
    _lines: int = 0
    _inode: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def update(self, seconds: float) -> Columns:
        """Read what was added, for some time; return the columns, sampled where not read yet."""
        with self._lock:
            try:
                with open_file(self.path) as file:
                    return self._read(file, time.monotonic() + seconds)
            except RunError as error:
                self.done, self.notes = True, [str(error)]
                return self.columns

    def _read(self, file: BinaryIO, until: float) -> Columns:
        found = os.fstat(file.fileno())
        if found.st_size < self._offset or found.st_ino != self._inode:
            # A resume cut the file or wrote another one.
            self.columns, self.notes, self._offset, self._lines = {}, [], 0, 0
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
        if self.done:
            return self.columns
        return joined(self.columns, columns_of(sampled(file, self._offset, found.st_size)))

    def _add(self, lines: Sequence[bytes]) -> None:
        rows = []
        for number, raw in enumerate(lines, start=self._lines + 1):
            row = step_row(raw)
            if row is None:
                self._note(parse_line(self.path, number, raw, STEP).problem)
            else:
                rows.append(row)
        self._lines += len(lines)
        if rows:
            self.columns = joined(self.columns, columns_of(rows))
        steps = self.columns.get("step", np.zeros(0))
        if (np.diff(steps) <= 0).any():  # rare: read it as other commands do
            self.notes = []
            self.columns = columns_of(RunFolder(self.path.parent).steps(self._note))

    def _note(self, text: str) -> None:
        if text and len(self.notes) < 5:
            self.notes.append(text)


def step_row(raw: bytes) -> Row | None:
    """Return a line as a row under today's names; None if it is not one."""
    try:
        row = from_json(raw, allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {current_name(name): value for name, value in row.items()}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return rows as columns. What is not a number becomes NaN."""
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
    """Return the rows of both; a metric that one of them lacks is NaN there."""
    if not first or not then:
        return first or then
    sizes = len(first["step"]), len(then["step"])
    return {
        name: np.concatenate(
            [
                part[name] if name in part else np.full(size, np.nan, dtype=np.float32)
                for part, size in zip((first, then), sizes, strict=True)
            ]
        )
        for name in {**first, **then}
    }


def sampled(file: BinaryIO, start: int, stop: int) -> list[Row]:
    """Return some steps of the rest of a file, evenly spaced and in order, the last among them."""
    rows: dict[int, Row] = {}
    for place in np.linspace(start, max(start, stop - CHUNK // 32), SAMPLED).astype(int):
        file.seek(place)
        if place != start:
            file.readline(CHUNK)
        row = step_row(file.readline(CHUNK))
        if row is not None:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def curve(
    columns: Columns,
    name: str,
    points: int,
    *,
    axis: str = "step",
    between: tuple[float, float] = (-np.inf, np.inf),
) -> dict[str, Any]:
    """Return a metric as at most `points` points: mean, lowest and highest of each interval."""
    steps, values = columns[axis].astype(np.float64), columns[name].astype(np.float64)
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
    """Return numbers with seven digits, as many as are stored."""
    return [float(f"{value:.7g}") for value in values.tolist()]


class StepTables:
    """The tables of many runs. The least recently used are dropped beyond a limit of memory."""

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
        total = sum(table.bytes for table in self._tables.values())
        for path in oldest:
            if total <= self.most_bytes:
                return
            total -= self._tables.pop(path).bytes
