"""From rows of data to prompts, for every task that reads them: which column means what."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.errors import ConfigError, DataError, nearest
from covey.tasks.task import asked, with_instruction
from covey.types import Message, Prompt

ROLES = ("system", "user", "assistant", "tool")
EXACT_FLOAT = 2**53
"""Below it every whole number has a float of its own."""
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""In a template: a doubled brace, a column, or `{}`, which is no column and stands as it is."""

Row = Mapping[str, Any]
Place = tuple[int, str, Row | str]
"""A row's number, where it stands as a user would say it, and the row, or why there is none."""


class BadRow(Exception):
    """A row is not what it should be; the message says what it lacks: `has no 'answer'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the columns of a row mean, and what happens to bad rows.

    The question is the column `question`, or `template` with every `{column}` filled in (`{{` and
    `}}` are braces, and `{}` stands as it is), or the column `messages`: a list of {role, content}
    that ends with what is asked. All columns but those of question, messages and answer are kept in
    `info`; `columns` gives columns other names there, and keeps whatever it names. `system`, if
    given, comes before each question, unless messages bring their own, and `instruction` after it.
    `only` is {column: values}: rows that have another value there are left out, and are not bad.

    Bad rows are errors, unless `skip_bad_rows`: then they are left out, and `bad_rows` says which,
    by split.
    """

    question: str = "question"
    answer: str = "answer"
    messages: str = ""
    template: str = ""
    columns: Mapping[str, str] | None = None
    system: str = ""
    instruction: str = ""
    only: Mapping[str, list[str]] | None = None
    skip_bad_rows: bool = False
    name: str = "table"
    bad_rows: dict[str, list[str]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.messages and self.template:
            raise ConfigError("task: give messages or template, not both")
        names = dict(self.columns or {})
        if len(set(names.values())) < len(names):
            raise ConfigError(f"task: columns gives one name to two columns: {names}")

    def read(self, split: str, rows: Iterable[Place], source: str) -> list[Prompt]:
        """Return the prompts of a split; `bad_rows[split]` then says what was left out."""
        prompts: list[Prompt] = []
        skipped = self.bad_rows[split] = []
        for number, where, row in rows:
            try:
                if isinstance(row, str):
                    raise BadRow(row)
                if self._is_wanted(row):
                    prompts.append(self._prompt(row, f"{self.name}/{split}/{number}"))
            except BadRow as error:
                line = f"task: {where} {error}"
                if not self.skip_bad_rows:
                    raise DataError(line) from None
                skipped.append(line)
        if not prompts:
            lost = f": {len(skipped)} bad rows, the first: {skipped[0]}" if skipped else ""
            raise DataError(f"task: {source} holds no prompts{lost}")
        return prompts

    def _is_wanted(self, row: Row) -> bool:
        only = (self.only or {}).items()
        return all(_column(row, column) in values for column, values in only)

    def _prompt(self, row: Row, identity: str) -> Prompt:
        return Prompt(
            id=identity,
            task=self.name,
            messages=self._messages(row),
            target=_answer(_column(row, self.answer), self.answer),
            info=self._info(row),
        )

    def _messages(self, row: Row) -> tuple[Message, ...]:
        if not self.messages:
            text = self._filled(row) if self.template else _column(row, self.question)
            question = _text(text, "template" if self.template else self.question)
            return asked(with_instruction(question, self.instruction), self.system)
        *before, last = _messages(_column(row, self.messages), self.messages)
        own = (before or [last])[0]["role"] == "system"
        system = [{"role": "system", "content": self.system}] if self.system and not own else []
        content = with_instruction(last["content"], self.instruction)
        return (*system, *before, {"role": last["role"], "content": content})

    def _filled(self, row: Row) -> str:
        return _PLACE.sub(lambda match: _in_place(match, row), self.template)

    def _info(self, row: Row) -> dict[str, Any]:
        names = self.columns or {}
        spent = {self.answer, self.messages or self.question, *names}
        if self.template:
            spent.discard(self.question)
        kept = {key: value for key, value in row.items() if key not in spent}
        return kept | {name: _column(row, column) for column, name in names.items()}


def _column(row: Row, name: str) -> Any:
    if name not in row:
        raise BadRow(f"has no {name!r}{nearest(name, row)}")
    return row[name]


def _in_place(match: re.Match[str], row: Row) -> str:
    if match[0] in ("{{", "}}"):
        return match[0][0]
    if not match[1]:
        return match[0]
    try:
        return _written(_column(row, match[1]))
    except BadRow as error:
        raise BadRow(f"{error}; in a template, write {{{{ and }}}} for braces") from None


def _written(value: Any) -> str:
    """Write a value as text. An empty cell makes floats of a column of whole numbers: 4.0 is 4."""
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
    except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer takes
        raise BadRow(f"has {column!r} with a character that does not exist") from None
    return value


def _answer(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"has {column!r} that is neither text nor a number but {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"has {column!r} that is {value}")
    return _encodable(_written(value), column)


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"has {column!r} that is not a list of messages")
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
        raise BadRow(f"has {column!r} that ends with the {messages[-1]['role']}: nothing is asked")
    return tuple(messages)
