"""Prompts from JSON Lines files: one object a line with a question and an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.errors import DataError, reason
from covey.tasks.rows import Place, Row, Table
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(Table):
    """Questions and answers from `train_file` and `held_out_file`, one object a line.

    `Table` says what the other options mean.
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


def json_lines(path: Path) -> Iterator[Place]:
    """Read a file of objects, blank lines aside; what is no object says so in its stead."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # bad text, and a path with NUL, are ValueErrors
        raise DataError(f"task: cannot read {path}: {reason(error)}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, f"{path}:{number}", json_object(line)


def json_object(line: str) -> Row | str:
    """Parse one line, or say what is the matter with it.

    >>> json_object('{"a": 1}'), json_object("[1]")
    ({'a': 1}, 'is not an object but list')
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return row if isinstance(row, dict) else f"is not an object but {type(row).__name__}"
