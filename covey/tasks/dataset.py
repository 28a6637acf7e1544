"""Tasks from data that is passed to the Python API: dicts, a `datasets.Dataset`, or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.tasks.jsonl import json_lines
from covey.tasks.rows import PROMPT_COLUMNS, RowReader
from covey.tasks.task import SplitTask, compared_text, hash_fraction
from covey.types import Prompt

NAME = "dataset"
"""The value of `task.name` in a run whose data was passed from Python."""
HELD_OUT_SHARE = 0.1
SHARE = "held_out_share"

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DatasetTask(SplitTask):
    """A task whose prompts a caller passed to the Python API."""

    prompts: Sequence[Prompt]
    evaluation: Sequence[Prompt] | None = None
    """The prompts for evaluations. If `evaluation` is None, the fraction `share` of `prompts` is
    held out."""
    conversational: bool = False
    """Whether prompts are lists of messages. If prompts are lists of messages, reward functions get
    each completion as a list of messages too."""
    share: float = HELD_OUT_SHARE
    name: str = NAME

    def _prompts(self, split: str) -> Sequence[Prompt]:
        """Split the prompts; a hash of a row's index decides whether its prompt is held out.

        Prompts with equal text are in the same split, except if all prompts would then be held out.
        """
        if self.evaluation is not None or not self.share:
            return self.prompts if split == "train" else self.evaluation or []
        first: dict[str, str] = {}
        together = [first.setdefault(compared_text(p), p.id) for p in self.prompts]
        chosen = self._held_out(together)
        if all(chosen):
            chosen = self._held_out([prompt.id for prompt in self.prompts])
        if all(chosen):
            raise ConfigError("dataset: pass at least two rows, or pass separate rows as held_out")
        held_out = split == "held_out"
        return [p for p, out in zip(self.prompts, chosen, strict=True) if out == held_out]

    def _held_out(self, ids: Sequence[str]) -> list[bool]:
        """Hold out the ids whose hash is below `share`, or the last id if all hashes are larger."""
        chosen = [hash_fraction(each) < self.share for each in ids]
        return chosen if any(chosen) else [each == ids[-1] for each in ids]


def dataset_task(
    dataset: Rows | str | Path, held_out: Rows | str | Path | None = None
) -> DatasetTask:
    """Make a task from rows with a `prompt` column; `target` and other columns are optional.

    A prompt is a text or a list of messages. If `held_out` is None, one row in ten is held out, but
    at least one row. If `held_out` is empty, all rows are for training.
    """
    rows = dataset if isinstance(dataset, str | Path) else list(dataset)
    prompts, conversational = _read("train", rows), _is_conversational(rows)
    if held_out is None:
        return DatasetTask(prompts, None, conversational)
    others: Sequence[Mapping[str, Any]] | str | Path = rows
    if held_out is not dataset:  # an iterator can be read only once
        others = held_out if isinstance(held_out, str | Path) else list(held_out)
    return DatasetTask(prompts, _read("held_out", others) if others else [], conversational)


def with_share(task: Any, options: Mapping[str, Any]) -> Any:
    """Return the task with the `held_out_share` of the [task] section, if the section sets it."""
    if not isinstance(task, DatasetTask) or SHARE not in options:
        return task
    share = options[SHARE]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"config: task.{SHARE} = {share!r} must be at least 0 and below 1")
    return replace(task, share=float(share))


def _is_conversational(rows: Sequence[Mapping[str, Any]] | str | Path) -> bool:
    """Whether the prompt of the first row is a list of messages."""
    lines = (row for _, _, row in json_lines(Path(rows))) if isinstance(rows, str | Path) else rows
    first = next(iter(lines), {})
    column = next((name for name in PROMPT_COLUMNS if name in first), "")
    return isinstance(first, Mapping) and isinstance(first.get(column), list)


def _read(split: str, rows: Rows | str | Path) -> list[Prompt]:
    reader = RowReader(name=NAME, optional_target=True)
    if isinstance(rows, str | Path):
        return reader.read(split, json_lines(Path(rows)), str(rows))
    numbered = ((n, f"{split} row {n}", _checked(row)) for n, row in enumerate(rows))
    return reader.read(split, numbered, split)


def _checked(row: object) -> dict[str, Any] | str:
    """Return a row as a dict, or a text that says why it is not a row."""
    return dict(row) if isinstance(row, Mapping) else f"is not a dict but {type(row).__name__}"
