"""Index of a rollout file: the offset of each line, and the fields that lists and filters need.

A rollout file may have a gigabyte. Each request of the web page indexes further lines for a
fraction of a second. A full rollout is read from its offset in the file when the page shows it.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from covey.errors import RunError
from covey.run.records import OLD_ROLLOUT, ROLLOUT, Row, open_file, parse_line, renamed

LONGEST = 2**26
"""Maximum length of a line in bytes; longer lines are not shown."""
HEAD = 160
"""Number of characters of each text that a list shows."""
KEPT = 4
"""Number of files whose index stays in memory."""


class Entry(NamedTuple):
    """The fields of a rollout that the index stores."""

    line: int
    """Line number, from 1."""
    offset: int
    size: int
    prompt_id: str
    prompt: str
    """The beginning of the prompt. The fields `target` and `text` are shortened too."""
    target: str
    text: str
    sample: int
    reward: float | None
    success: bool | None
    advantage: float | None
    finish: str
    tokens: int
    turns: int
    parts: Mapping[str, float]


@dataclass(slots=True)
class RolloutIndex:
    """The index of one rollout file, up to the last line that was read."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    done: bool = False
    share: float = 0.0
    """Fraction of the file that has been read."""
    _offset: int = 0
    _lines: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, seconds: float) -> None:
        """Read and index further lines for at most this many seconds."""
        until = time.monotonic() + seconds
        with self._lock:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self._offset)
                while self._offset < size and time.monotonic() < until:
                    self._take(file)
            self.share = self._offset / size if size else 1.0
            self.done = self._offset >= size

    def _take(self, file: BinaryIO) -> None:
        raw = file.readline(LONGEST)
        size = len(raw)
        self._lines += 1
        if size == LONGEST and not raw.endswith(b"\n"):
            while (more := file.readline(LONGEST)) and not more.endswith(b"\n"):
                size += len(more)
            size += len(more)
            self._note(f"{self.path} line {self._lines} is longer than 64 MiB; it is left out")
        else:
            row = _row(raw)
            if row is not None:
                self.entries.append(_entry(row, self._lines, self._offset, size))
            elif raw.endswith(b"\n"):
                self._note(parse_line(self.path, self._lines, raw, ROLLOUT).problem)
            else:
                self._note(f"{self.path}: its last line is cut off; it is left out")
        self._offset += size

    def _note(self, text: str) -> None:
        if len(self.notes) < 5:
            self.notes.append(text)

    def row(self, line: int) -> Row:
        """Read a rollout from the file, by its line number, and return it."""
        entry = next((entry for entry in self.entries if entry.line == line), None)
        row = None if entry is None else self._read(entry)
        if row is None:
            raise RunError(f"{self.path} has no readable line {line}")
        return row

    def _read(self, entry: Entry) -> Row | None:
        with open_file(self.path) as file:
            file.seek(entry.offset)
            return _row(file.read(entry.size))

    def search(self, words: str, seconds: float) -> tuple[set[int], bool]:
        """Return lines with `words` in prompt, target or text, and whether all were searched."""
        until = time.monotonic() + seconds
        found: set[int] = set()
        # JSON escapes non-ASCII characters. A match in the raw bytes may be in another field.
        escaped = re.compile(re.escape(json.dumps(words)[1:-1].encode()), re.IGNORECASE)
        plain = re.compile(re.escape(words), re.IGNORECASE)
        for entry, raw in self._raw():
            if time.monotonic() > until:
                return found, False
            row = _row(raw) if escaped.search(raw) or not words.isascii() else None
            if row and any(plain.search(row[name]) for name in ("prompt", "target", "text")):
                found.add(entry.line)
        return found, True

    def _raw(self) -> Iterator[tuple[Entry, bytes]]:
        with open_file(self.path) as file:
            for entry in list(self.entries):
                file.seek(entry.offset)
                yield entry, file.read(entry.size)


def _row(raw: bytes) -> Row | None:
    """Parse a line as a rollout, with current field names; None if it is not a rollout."""
    try:
        row = from_json(raw, allow_inf_nan=False)
        ROLLOUT.validate_python(row)
    except (ValueError, ValidationError):
        return None
    return renamed([row], OLD_ROLLOUT)[0]


def _entry(row: Row, line: int, offset: int, size: int) -> Entry:
    return Entry(
        line=line,
        offset=offset,
        size=size,
        prompt_id=row["prompt_id"],
        prompt=row["prompt"][:HEAD],
        target=row["target"][:HEAD],
        text=row["text"][:HEAD],
        sample=row.get("sample", 0),
        reward=row["reward"],
        success=row["success"],
        advantage=row["advantage"],
        finish=row.get("finish", ""),
        tokens=len(row.get("tokens", ())),
        turns=len(row.get("turns", ())),
        parts=row.get("parts", {}),
    )


class RolloutIndexes:
    """The indexes of the most recently used rollout files."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Path, int, int], RolloutIndex] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> RolloutIndex:
        try:
            found = path.stat()
        except OSError:
            raise RunError(f"{path.name} is not among the run's rollouts") from None
        key = (path, found.st_size, found.st_mtime_ns)
        with self._lock:
            index = self._kept.pop(key, None) or RolloutIndex(path)
            self._kept[key] = index
            for old in list(self._kept)[:-KEPT]:
                del self._kept[old]
            return index
