"""Indexes the rollout files for the web page: the offset and some fields of each line.

A rollout file may be a gigabyte in size. To keep the page responsive, each request spends only a
fraction of a second on indexing more lines. A rollout is read from its offset when the page shows
the rollout.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from covey.errors import RunError
from covey.records.records import ROLLOUT, Number, Row, open_file, parse_line

LONGEST = 2**26
"""Maximum length of a line in bytes; longer lines are not shown."""
HEAD = 160
"""Number of characters of each prompt, and of each target, that the index stores."""
KEPT = 4
"""Maximum number of rollout files whose index stays in memory."""


@with_config(ConfigDict(strict=True))
class _Listed(TypedDict):
    """The fields that the index reads from a line, which do not include the long lists of
    log-probs."""

    prompt_id: str
    prompt: str
    target: str
    text: str
    reward: Number | None
    success: bool | None
    advantage: Number | None
    finish: NotRequired[str]
    tokens: NotRequired[list[Any]]


LISTED: TypeAdapter[_Listed] = TypeAdapter(_Listed)


class Entry(NamedTuple):
    """The fields of a rollout that the index stores."""

    line: int
    """Line number in the file, counted from 1."""
    offset: int
    size: int
    prompt_id: str
    prompt: str
    """The first `HEAD` characters of the prompt; `target` is cut in the same way."""
    target: str
    text: int
    """Hash of the completion's text; completions with the same hash count as identical."""
    reward: float | None
    success: bool | None
    finish: str
    tokens: int


@dataclass(slots=True)
class RolloutIndex:
    """The index of the lines of a rollout file that Covey has read so far."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    groups: dict[str, list[Entry]] = field(default_factory=dict)
    """Maps each prompt id to the index entries of the prompt's rollouts."""
    notes: list[str] = field(default_factory=list)
    done: bool = False
    share: float = 0.0
    """The fraction of the file that has been indexed so far."""
    _offset: int = 0
    _lines: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, seconds: float) -> None:
        """Index more lines of the file, for at most the given number of seconds."""
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
            try:
                self._keep(LISTED.validate_json(raw), size)
            except ValidationError:
                if raw.endswith(b"\n"):
                    self._note(parse_line(self.path, self._lines, raw, ROLLOUT).problem)
                else:
                    self._note(f"{self.path}: its last line is cut off; it is left out")
        self._offset += size

    def _keep(self, row: _Listed, size: int) -> None:
        group = self.groups.setdefault(row["prompt_id"], [])
        prompt, target = row["prompt"][:HEAD], row["target"][:HEAD]
        if group:  # share equal texts: a file may have a hundred thousand lines
            first = group[0]
            prompt = first.prompt if first.prompt == prompt else prompt
            target = first.target if first.target == target else target
        entry = Entry(
            line=self._lines,
            offset=self._offset,
            size=size,
            prompt_id=group[0].prompt_id if group else row["prompt_id"],
            prompt=prompt,
            target=target,
            text=hash(row["text"]),
            reward=row["reward"],
            success=row["success"],
            finish=sys.intern(row.get("finish", "")),
            tokens=len(row.get("tokens", ())),
        )
        group.append(entry)
        self.entries.append(entry)

    def _note(self, text: str) -> None:
        if len(self.notes) < 5:
            self.notes.append(text)

    def row(self, line: int) -> Row:
        """Read and return the rollout at the given line of the file."""
        place = bisect_left(self.entries, line, key=lambda entry: entry.line)
        found = self.entries[place : place + 1]
        row = None
        if found and found[0].line == line:
            with open_file(self.path) as file:
                file.seek(found[0].offset)
                row = _row(file.read(found[0].size))
        if row is None:
            raise RunError(f"line {line} of the file {self.path} cannot be read")
        return row

    def search(self, words: str, seconds: float) -> tuple[set[int], bool]:
        """Return the line numbers of rollouts whose prompt, target or completion contains `words`.

        The second return value is True if the search reached the end of the file within `seconds`.
        """
        until = time.monotonic() + seconds
        found: set[int] = set()
        # JSON escapes non-ASCII characters. A match in the raw bytes may be in another field.
        escaped = re.compile(re.escape(json.dumps(words)[1:-1].encode()), re.IGNORECASE)
        plain = re.compile(re.escape(words), re.IGNORECASE)
        with open_file(self.path) as file:
            for entry in list(self.entries):
                if time.monotonic() > until:
                    return found, False
                file.seek(entry.offset)
                raw = file.read(entry.size)
                row = _row(raw) if escaped.search(raw) or not words.isascii() else None
                if row and any(plain.search(row[name]) for name in ("prompt", "target", "text")):
                    found.add(entry.line)
        return found, True


def _row(raw: bytes) -> Row | None:
    try:
        row: Row = from_json(raw, allow_inf_nan=False)
        ROLLOUT.validate_python(row)
    except (ValueError, ValidationError):
        return None
    return row


def rollout_index(path: Path) -> RolloutIndex:
    """Return the index of a rollout file. The last `KEPT` indexes stay in memory."""
    try:
        found = path.stat()
    except OSError:
        raise RunError(f"the run has no file {path.name} with rollouts") from None
    return _index(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _index(path: Path, size: int, changed: int) -> RolloutIndex:
    return RolloutIndex(path)
