"""The `jsonl` task: prompts from JSON Lines files, one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DataError, reason
from covey.tasks.rows import NumberedRow, Row, RowReader, check_share
from covey.tasks.task import SplitTask
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(RowReader, SplitTask):
    """Prompts and targets from `train_file` and `held_out_file`, one JSON object per line.

    With a single file, leave `held_out_file` empty to hold out the fraction `held_out_share` of
    `train_file`; a share of 0 holds out no prompts, for runs without evaluations. A hash of the
    prompt's text decides whether the prompt is held out. Every run holds out the same prompts, and
    prompts with equal text are in the same split. `RowReader` documents the options that define the
    meaning of the columns.
    """

    train_file: str
    held_out_file: str = ""
    held_out_share: float = 0.1
    name: str = "jsonl"

    def __post_init__(self) -> None:
        RowReader.__post_init__(self)
        check_share(self.held_out_share, "file")

    def _prompts(self, split: str) -> list[Prompt]:
        file = (split == "held_out" and self.held_out_file) or self.train_file
        prompts = self.read(split, json_lines(Path(file)), file)
        if self.held_out_file:
            return prompts
        return self.part(split, prompts, self.held_out_share, file)


def json_lines(path: Path) -> Iterator[NumberedRow]:
    """Read a JSON Lines file; yield each row with its line number and location.

    Blank lines are skipped. For a line that is not a JSON object, an error message takes the place
    of the row.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # undecodable text, or a path with NUL: ValueError
        raise DataError(f"task: cannot read {path}: {reason(error)}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, f"{path}:{number}", json_object(line)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a JSON Lines file; raise DataError for a value that JSON does not have."""
    lines = []
    for number, row in enumerate(rows):
        for column, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"dataset: row {number} has {column!r} that JSON cannot hold: {error}; convert "
                    f"the column to text, numbers or lists, or remove it"
                ) from None
        lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def json_object(line: str) -> Row | str:
    """Parse one line as a JSON object, or return an error message that says what is wrong.

    >>> json_object('{"a": 1}'), json_object("[1]")
    ({'a': 1}, 'is not an object but list')
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return row if isinstance(row, dict) else f"is not an object but {type(row).__name__}"
