"""Tables of the metrics of runs, which Covey reads from steps.jsonl as the file grows.

A request reads steps.jsonl for a fraction of a second, and the next request continues where the
previous request stopped. If the first request cannot read the whole file, it also samples the
unread steps, so that the page can draw whole curves at once. A run has more than a hundred metrics.
A table stores only the metrics that requests ask for, which are about a dozen.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from covey.errors import RunError
from covey.records.folder import RunFolder
from covey.records.metric_registry import current_name
from covey.records.records import STEP, Row, open_file, parse_line

CHUNK = 2**20
"""The number of bytes that Covey reads from steps.jsonl at a time."""
SAMPLED = 200
"""The number of steps to sample from the unread part of steps.jsonl."""
AXES = ("step", "tokens", "time/from_scratch")
"""Metrics that a table always stores, because most pages show them. A table also stores the metrics
of all reward components (`objective/parts/`)."""
PARTS = "objective/parts/"
Columns = dict[str, np.ndarray]
"""Maps each metric name to a float32 array with one value per step; missing values are NaN, and the
array of `step` is float64."""
name_now = lru_cache(maxsize=4096)(current_name)


@dataclass(slots=True)
class StepTable:
    """The metrics of all steps of one run; the methods are thread-safe."""

    path: Path
    """steps.jsonl."""
    pieces: list[Columns] = field(default_factory=list)
    """The metrics of all steps read so far, as several tables in the order of the steps. Each table
    has at least twice as many steps as the next table, so that adding new steps rarely copies a
    large table."""
    names: set[str] = field(default_factory=set)
    """The names of all metrics in steps.jsonl, including metrics that the table does not store."""
    notes: list[str] = field(default_factory=list)
    done: bool = False
    _kept: set[str] = field(default_factory=lambda: set(AXES))
    _sample: Columns = field(default_factory=dict)
    _offset: int = 0
    _lines: int = 0
    _inode: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def memory(self) -> int:
        return sum(column.nbytes for piece in self.pieces for column in piece.values())

    def update(
        self, metrics: Collection[str], seconds: float, samples: int = SAMPLED
    ) -> list[Columns]:
        """Read new lines of steps.jsonl for up to `seconds` seconds.

        Return all steps read so far, and a sample of the unread steps. If the table does not yet
        store one of `metrics`, read the file again from the start.
        """
        with self._lock:
            try:
                with open_file(self.path) as file:
                    return self._read(file, metrics, time.monotonic() + seconds, samples)
            except RunError as error:
                self.done, self.notes = True, [str(error)]
                return list(self.pieces)

    def _read(
        self, file: BinaryIO, metrics: Collection[str], until: float, samples: int
    ) -> list[Columns]:
        found = os.fstat(file.fileno())
        replaced = found.st_size < self._offset or found.st_ino != self._inode  # by a resume
        if replaced or not self._kept.issuperset(metrics):
            self.pieces, self.notes, self._sample, self._offset, self._lines = [], [], {}, 0, 0
            self._inode = found.st_ino
            self._kept.update(metrics)
        self.done = found.st_size == self._offset
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
            self._sample = {}
            return list(self.pieces)
        return [*self.pieces, *self._rest(file, found.st_size, samples)]

    def _rest(self, file: BinaryIO, size: int, samples: int) -> Iterator[Columns]:
        """Yield a sample of the steps that are not read yet; sample the file only once."""
        if len(self._sample.get("step", ())) < samples // 2:
            rows = list(sampled(file, self._offset, size, samples))
            self._sample = self._columns(rows) if rows else {}
        if self._sample:
            last = self.pieces[-1]["step"][-1] if self.pieces else -np.inf
            rest = self._sample["step"] > last
            yield {name: column[rest] for name, column in self._sample.items()}

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
        new = self._columns(rows)
        before = self.pieces[-1]["step"][-1:] if self.pieces else new["step"][:0]
        if (np.diff(np.concatenate([before, new["step"]])) <= 0).any():
            # Steps out of order are rare. Read the whole file, as other commands do.
            self.notes = []
            self.pieces = [self._columns(RunFolder(self.path.parent).steps(self._note))]
            return
        self.pieces.append(new)
        while len(self.pieces) > 1 and len(self.pieces[-2]["step"]) < 2 * len(new["step"]):
            new = joined(self.pieces[-2], new)
            self.pieces[-2:] = [new]

    def _columns(self, rows: Sequence[Row]) -> Columns:
        """Return the columns that the table stores, and add all metric names to `names`."""
        columns: Columns = {}
        for written in dict.fromkeys(chain.from_iterable(rows)):
            name = name_now(written)
            if name in self._kept or name.startswith(PARTS):
                values = numbers([row.get(written) for row in rows])
                if name in columns:  # the same metric under an older name
                    values = np.where(np.isnan(values), columns[name], values)
                columns[name] = values
            if name not in self.names and any(_is_number(row.get(written)) for row in rows):
                self.names.add(name)
        columns["step"] = np.array([row["step"] for row in rows], dtype=np.float64)
        return {name: column for name, column in columns.items() if not np.isnan(column).all()}

    def _note(self, text: str) -> None:
        if text and len(self.notes) < 5:
            self.notes.append(text)


def step_row(raw: bytes) -> Row | None:
    try:
        row = from_json(raw, allow_inf_nan=False)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def numbers(values: Sequence[Any]) -> np.ndarray:
    """Return values as float32, with NaN in place of values that are not numbers."""
    try:
        return np.frombuffer(array("f", values), dtype=np.float32)
    except (TypeError, OverflowError):
        return numbers([value if _is_number(value) else np.nan for value in values])


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)


def joined(first: Columns, then: Columns) -> Columns:
    """Join two tables of consecutive steps.

    If only one table has a metric, the metric is NaN in the rows of the other table.
    """
    return {name: column([first, then], name) for name in {**first, **then}}


def column(pieces: Sequence[Columns], name: str) -> np.ndarray:
    parts = [
        piece[name] if name in piece else np.full(len(piece["step"]), np.nan, dtype=np.float32)
        for piece in pieces
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sampled(file: BinaryIO, start: int, stop: int, count: int) -> Iterator[Row]:
    """Yield steps at evenly spaced positions in the unread part of steps.jsonl."""
    last = -1
    for place in np.linspace(start, max(start, stop - CHUNK // 16), count).astype(int):
        file.seek(place)
        if place != start:
            file.readline(CHUNK)
        row = step_row(file.readline(CHUNK))
        if row is not None and row["step"] > last:
            last = row["step"]
            yield row


def curve(
    pieces: Sequence[Columns],
    name: str,
    points: int,
    *,
    axis: str = "step",
    between: tuple[float, float] = (-np.inf, np.inf),
) -> dict[str, Any]:
    """Return the curve of a metric with at most `points` points.

    Each point covers an interval of steps, and has the mean, the lowest and the highest value of
    the metric in this interval.
    """
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
    """Round values to seven significant digits, the precision of float32."""
    with np.errstate(divide="ignore"):
        digits = 6 - np.floor(np.log10(np.abs(values)))
    digits = np.where(np.abs(digits) < 300, digits, 0)
    scale = 10.0 ** np.abs(digits)
    few = np.where(digits >= 0, np.round(values * scale) / scale, np.round(values / scale) * scale)
    rounded: list[float] = few.tolist()
    return rounded


class StepTables:
    """A least-recently-used cache of the metric tables of many runs."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._tables: dict[Path, StepTable] = {}
        self._lock = threading.Lock()

    def __getitem__(self, run: Path) -> StepTable:
        with self._lock:
            table = self._tables.pop(run, None) or StepTable(run / "steps.jsonl")
            self._tables[run] = table  # last: the most recently used
            total = sum(each.memory for each in self._tables.values())
            for oldest in list(self._tables)[:-1]:
                if total <= self.most_bytes:
                    break
                total -= self._tables.pop(oldest).memory
            return table
