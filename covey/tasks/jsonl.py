"""Prompts from JSON Lines files: one object a line with a question and an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DataError, nearest
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl:
    """Questions and answers from `train_file` and `held_out_file`.

    Every line is an object with the fields named by `question` and `answer`; all others are kept
    in the prompt's `info`. `system`, if given, comes before each question.
    """

    train_file: str
    held_out_file: str
    question: str = "question"
    answer: str = "answer"
    system: str = ""
    name: str = "jsonl"

    def train(self) -> Sequence[Prompt]:
        """The prompts of `train_file`."""
        return self._read(Path(self.train_file), "train")

    def held_out(self) -> Sequence[Prompt]:
        """The prompts of `held_out_file`."""
        return self._read(Path(self.held_out_file), "held_out")

    def _read(self, path: Path, split: str) -> list[Prompt]:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"task: cannot read {path}: {error}") from None
        prompts = [
            self._prompt(json_object(line, path, number), split, path, number)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not prompts:
            raise DataError(f"task: {path} holds no prompts")
        return prompts

    def _prompt(self, row: dict[str, Any], split: str, path: Path, number: int) -> Prompt:
        for field in (self.question, self.answer):
            if field not in row:
                raise DataError(f"task: {path}:{number} has no {field!r}{nearest(field, row)}")
        messages = [{"role": "user", "content": str(row[self.question])}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Prompt(
            id=f"{self.name}/{split}/{number}",
            task=self.name,
            messages=tuple(messages),
            answer=str(row[self.answer]),
            info={k: v for k, v in row.items() if k not in (self.question, self.answer)},
        )


def json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    """Parse one line, or say which line of which file is at fault."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"task: {path}:{number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"task: {path}:{number} is not an object but {type(row).__name__}")
    return row
