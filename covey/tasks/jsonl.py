"""The `jsonl` task: prompts from JSON Lines files, one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.errors import DataError, reason
from covey.tasks.rows import NumberedRow, Row, RowReader
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(RowReader):
    """Prompts and targets from `train_file` and `held_out_file`, one JSON object per line.

    `RowReader` documents the other options.
    """

    train_file: str
    held_out_file: str
    name: str = "jsonl"

    def train(self) -> Sequence[Prompt]:
        """The prompts of `train_file`."""
        return self.read("train", json_lines(Path(self.train_file)), self.train_file)

    def held_out(self) -> Sequence[Prompt]:
        """The prompts of `held_out_file`."""
        return self.read("held_out", json_lines(Path(self.held_out_file)), self.held_out_file)


def json_lines(path: Path) -> Iterator[NumberedRow]:
    """Read a file of JSON objects.

    Blank lines are skipped; for a line that is not an object, return what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # undecodable text, or a path with NUL: ValueError
        raise DataError(f"task: cannot read {path}: {reason(error)}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, f"{path}:{number}", json_object(line)


def json_object(line: str) -> Row | str:
    """Parse one line, or return what is wrong with it.

    >>> json_object('{"a": 1}'), json_object("[1]")
    ({'a': 1}, 'is not an object but list')
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return row if isinstance(row, dict) else f"is not an object but {type(row).__name__}"
