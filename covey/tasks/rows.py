"""Turns rows of data into prompts. Options define the meaning of the columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError, closest, nearest, reason
from covey.tasks.task import (
    SplitTask,
    chat_messages,
    compared_text,
    hash_fraction,
    hashed_into,
    with_instruction,
)
from covey.types import Message, Prompt

ROLES = ("system", "user", "assistant", "tool")
PROMPT_COLUMNS = ("prompt", "question", "messages")
TARGET_COLUMNS = ("target", "answer")
"""Default names of the target column. A row with both `target` and `answer` uses `target`."""
EXACT_FLOAT = 2**53
"""A float represents every integer below this limit exactly."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""Matches a doubled brace, a `{column}` placeholder, or `{}` in a prompt template."""

Row = Mapping[str, Any]
NumberedRow = tuple[int, str, Row | str]
"""The number of a row, the row's location for error messages, and the row itself. If the row cannot
be read, an error message takes the place of the row."""


class BadRow(Exception):
    """Raised if a row cannot become a prompt; the message is the reason, such as `has no
    'target'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Turns rows into prompts. The options define the meaning of each column.

    - `prompt` names the column with the prompt, which is a text or a list of `{role, content}`
      messages. By default, the prompt column is the first of `prompt`, `question` and `messages`
      that a row has.
    - `template` is a text that replaces the prompt column: every `{column}` in the template becomes
      the row's value in that column. Write `{{` and `}}` for literal braces; `{}` is not replaced.
    - `target` names the column with the expected answer; the default is `target` or `answer`.
    - With `optional_target`, a row may lack a target, for rewards that read other columns.
    - `columns` maps the name of a column to the name under which `info` stores the value. `info`
      also stores the columns that no option uses.
    - `system` is the system message for prompts that contain no system message.
    - `instruction` is a text that is appended to each prompt.
    - `only` maps the name of a column to its allowed values. Rows with any other value in such a
      column are left out, and do not count as bad rows.

    By default, a bad row raises an error. With `skip_bad_rows`, bad rows are left out, and
    `bad_rows` lists the bad rows of each split.
    """

    renamed_options: ClassVar[Mapping[str, str]] = {
        "question": "prompt",
        "messages": "prompt",
        "answer": "target",
    }

    prompt: str = ""
    target: str = ""
    optional_target: bool = False
    template: str = ""
    columns: Mapping[str, str] | None = None
    system: str = ""
    instruction: str = ""
    only: Mapping[str, list[str]] | None = None
    skip_bad_rows: bool = False
    name: str = "rows"
    bad_rows: dict[str, list[str]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.prompt and self.template:
            raise ConfigError("task: set the option `prompt` or the option `template`, not both")
        names = dict(self.columns or {})
        if len(set(names.values())) < len(names):
            raise ConfigError(
                f"task: the option `columns` gives the same name to two columns: {names}"
            )

    def read(self, split: str, rows: Iterable[NumberedRow], source: str) -> list[Prompt]:
        """Return the prompts of a split, and write its bad rows to `bad_rows[split]`."""
        prompts: list[Prompt] = []
        skipped = self.bad_rows[split] = []
        for number, where, row in rows:
            try:
                if isinstance(row, str):
                    raise BadRow(row)
                only = (self.only or {}).items()
                if all(_value(row, column) in values for column, values in only):
                    prompts.append(self._prompt(row, f"{self.name}/{split}/{number}"))
            except BadRow as error:
                line = f"task: {where} {error}"
                if not self.skip_bad_rows:
                    raise DataError(line) from None
                skipped.append(line)
        if not prompts:
            bad_rows = f": {len(skipped)} bad rows, the first: {skipped[0]}" if skipped else ""
            raise DataError(f"task: {source} has no prompts{bad_rows}")
        return prompts

    def part(self, split: str, prompts: list[Prompt], share: float, source: str) -> list[Prompt]:
        """Divide data that has only one split; return the training or held-out prompts."""
        if not share:
            return prompts if split == "train" else []
        chosen = [p for p in prompts if hashed_into(split, self._hashed_text(p), share)]
        if not chosen:
            raise DataError(
                f"task: {source} has too few rows: with held_out_share = {share}, there are no "
                f"{split} prompts"
            )
        return chosen

    def _hashed_text(self, prompt: Prompt) -> str:
        text = "\n".join(m["content"] for m in prompt.messages if m["role"] != "system")
        # A change of the instruction must not move prompts between the splits.
        return text.removesuffix(with_instruction("", self.instruction))

    def _prompt(self, row: Row, identity: str) -> Prompt:
        if self.template:
            used = "template"
            value = _PLACEHOLDER.sub(lambda match: _replacement(match, row), self.template)
        else:
            used = _present(row, self.prompt, PROMPT_COLUMNS)
            value = row[used]
        target, answer = "", ""
        columns = (self.target,) if self.target else TARGET_COLUMNS
        if not self.optional_target or any(name in row for name in columns):
            target = _present(row, self.target, TARGET_COLUMNS)
            answer = _target(row[target], target)
        return Prompt(
            id=identity,
            task=self.name,
            messages=self._messages(value, used),
            target=answer,
            info=self._info(row, {target} if self.template else {target, used}),
            columns={name: row[name] for name in (target, used) if name in row},
        )

    def _messages(self, value: Any, column: str) -> tuple[Message, ...]:
        if not isinstance(value, list):
            text = with_instruction(_text(value, column), self.instruction)
            return chat_messages(text, self.system)
        *before, last = _messages(value, column)
        own = (before or [last])[0]["role"] == "system"
        system = [{"role": "system", "content": self.system}] if self.system and not own else []
        content = with_instruction(last["content"], self.instruction)
        return (*system, *before, {"role": last["role"], "content": content})

    def _info(self, row: Row, used: set[str]) -> dict[str, Any]:
        names = self.columns or {}
        kept = {k: value for k, value in row.items() if k not in used and k not in names}
        return kept | {name: _value(row, column) for column, name in names.items()}


def check_share(share: float, unit: str) -> None:
    """Raise ConfigError if the held-out share is not between 0 and 1.

    `unit` is `file` or `split`; the error message names the options `train_{unit}` and
    `held_out_{unit}`.
    """
    if not 0 <= share < 1:
        raise ConfigError(
            f"task: held_out_share = {share} must be at least 0 and below 1; to train on all rows "
            f"of train_{unit}, set held_out_{unit}, or set held_out_share = 0 for no held-out rows"
        )


def _value(row: Row, column: str) -> Any:
    return row[_present(row, column, ())]


def _present(row: Row, column: str, defaults: tuple[str, ...]) -> str:
    """Return the configured column, or else the first default column that the row has."""
    choices = (column,) if column else defaults
    for name in choices:
        if name in row:
            return name
    typo = next((name for name in choices if closest(name, row)), choices[0])
    raise BadRow(f"has no {' or '.join(map(repr, choices))}{nearest(typo, row)}")


def _replacement(match: re.Match[str], row: Row) -> str:
    if match[0] in ("{{", "}}"):
        return match[0][0]
    if not match[1]:
        return match[0]
    try:
        return _written(_value(row, match[1]))
    except BadRow as error:
        raise BadRow(f"{error}; in a template, write {{{{ and }}}} for braces") from None


def _written(value: Any) -> str:
    """Return a value as text.

    The float 4.0 becomes `4`, because an empty cell turns a column of integers into floats.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOAT:
        return str(int(value))
    return str(value)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"has {column!r} that is not text but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"has an empty {column!r}")
    return _encodable(value, column)


def _encodable(value: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer accepts
        raise BadRow(f"has {column!r} with a character that is not valid Unicode") from None
    return value


def _target(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"has {column!r} that is neither text nor a number but {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"has {column!r} that is {value}")
    return _encodable(_written(value), column)


def _messages(value: list[Any], column: str) -> tuple[Message, ...]:
    if not value:
        raise BadRow(f"has an empty {column!r}")
    messages = []
    for at, message in enumerate(value):
        where = f"{column}[{at}]"
        if not isinstance(message, dict):
            raise BadRow(f"has {where} that is not an object but {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRow(f"has {where} whose role is {role!r}; choose from {', '.join(ROLES)}")
        messages.append({"role": role, "content": _text(content, f"{where}.content")})
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(
            f"has {column!r} that ends with the {messages[-1]['role']}; the last message must be "
            "from the user or a tool"
        )
    return tuple(messages)


# The `jsonl` task: prompts from JSON Lines files, one object per line.


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


# Tasks from data that is passed to the Python API: dicts, a `datasets.Dataset`, or a file.


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
    lines = (row for _, _, row in json_lines(Path(rows))) if isinstance(rows, str | Path) else rows
    first = next(iter(lines), {})
    column = next((name for name in PROMPT_COLUMNS if name in first), "")
    return isinstance(first, Mapping) and isinstance(first.get(column), list)


def _read(split: str, rows: Rows | str | Path) -> list[Prompt]:
    reader = RowReader(name=NAME, optional_target=True)
    if isinstance(rows, str | Path):
        return reader.read(split, json_lines(Path(rows)), str(rows))
    numbered = (
        (
            n,
            f"{split} row {n}",
            dict(row) if isinstance(row, Mapping) else f"is not a dict but {type(row).__name__}",
        )
        for n, row in enumerate(rows)
    )
    return reader.read(split, numbered, split)
