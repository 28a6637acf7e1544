"""Tasks from data in memory, for the Python API: dicts, a `datasets.Dataset`, or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.tasks.jsonl import json_lines
from covey.tasks.rows import PROMPT_COLUMNS, TARGET_COLUMNS, NumberedRow, RowReader
from covey.tasks.task import hash_fraction
from covey.types import Prompt

NAME = "dataset"
"""The value of `task.name` in a run whose data was passed from Python."""
HELD_OUT_SHARE = 0.1

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DatasetTask:
    """A task of prompts that were passed from Python."""

    training: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    conversational: bool = False
    """Whether prompts are lists of messages. For prompts that are lists of messages, reward
    functions also get completions as messages."""
    name: str = NAME

    def train(self) -> Sequence[Prompt]:
        """The prompts to train on."""
        return self.training

    def held_out(self) -> Sequence[Prompt]:
        """The prompts for evaluations only."""
        return self.evaluation


def dataset_task(
    dataset: Rows | str | Path, held_out: Rows | str | Path | None = None
) -> DatasetTask:
    """Make a task of rows with a `prompt` (text or messages), and maybe `target` and other columns.

    Without `held_out`, one row in ten is held out, but at least one row. A hash of the row's index
    decides whether a row is held out, so the choice does not depend on other rows.
    """
    rows = dataset if isinstance(dataset, str | Path) else list(dataset)
    prompts, conversational = _read("train", rows), _is_conversational(rows)
    if held_out is not None:
        return DatasetTask(prompts, _read("held_out", held_out), conversational)
    chosen = [hash_fraction(prompt.id) < HELD_OUT_SHARE for prompt in prompts]
    if not any(chosen):
        chosen[-1] = True
    training = [prompt for prompt, out in zip(prompts, chosen, strict=True) if not out]
    if not training:
        raise ConfigError(
            "dataset: all rows were held out, so no row is left for training; give more rows, or "
            "pass held-out rows as held_out"
        )
    evaluation = [prompt for prompt, out in zip(prompts, chosen, strict=True) if out]
    return DatasetTask(training, evaluation, conversational)


def _is_conversational(rows: Sequence[Mapping[str, Any]] | str | Path) -> bool:
    """Whether the prompt of the first row is a list of messages."""
    lines = (row for _, _, row in json_lines(Path(rows))) if isinstance(rows, str | Path) else rows
    first = next(iter(lines), {})
    column = next((name for name in PROMPT_COLUMNS if name in first), "")
    return isinstance(first, Mapping) and isinstance(first.get(column), list)


def _read(split: str, rows: Rows | str | Path) -> list[Prompt]:
    reader = RowReader(name=NAME)
    if isinstance(rows, str | Path):
        return reader.read(split, map(_with_target, json_lines(Path(rows))), str(rows))
    numbered = ((n, f"{split} row {n}", row) for n, row in enumerate(rows))
    return reader.read(split, map(_with_target, numbered), split)


def _with_target(numbered: NumberedRow | tuple[int, str, Mapping[str, Any]]) -> NumberedRow:
    """Add an empty target to a row without a target, because a reward may not need targets."""
    number, where, row = numbered
    if not isinstance(row, Mapping):
        what = row if isinstance(row, str) else f"is not a dict but {type(row).__name__}"
        return number, where, what
    lacks = not any(column in row for column in TARGET_COLUMNS)
    return number, where, {**row, "target": ""} if lacks else dict(row)
