"""A user's task, whose prompts are checked when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import CoveyError, DataError, users_error
from covey.tasks.task import Task
from covey.types import Prompt

FIRST = 8
"""If prompts are generated on access, only this many prompts are checked. If the prompts are a
list, all of them are checked."""


@dataclass(frozen=True, slots=True)
class UserTask:
    """A user's task that checks each prompt; for an invalid prompt, an error says what is wrong."""

    task: Task
    path: str

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task.name

    @property
    def bad_rows(self) -> Mapping[str, Sequence[str]]:
        """The bad rows that the task skipped, if the task lists its bad rows."""
        found: Mapping[str, Sequence[str]] = getattr(self.task, "bad_rows", {})
        return found

    def train(self) -> Sequence[Prompt]:
        """Prompts for training."""
        return self._checked("train")

    def held_out(self) -> Sequence[Prompt]:
        """Prompts for evaluation only."""
        return self._checked("held_out")

    def _checked(self, split: str) -> Sequence[Prompt]:
        where = f"task: {self.path}: {split}()"
        try:
            found: Any = getattr(self.task, split)()
            listed = found if isinstance(found, Sequence) else None
            if listed is None and isinstance(found, Iterable):
                listed = list(found)
        except CoveyError:
            raise
        except Exception as error:
            raise DataError(f"{where} raised an error: {users_error(error)}") from error
        if listed is None or isinstance(listed, str | bytes):
            raise DataError(
                f"{where} returned {type(found).__name__}; it must return a sequence of "
                "covey.Prompt"
            )
        count = len(listed) if isinstance(listed, list | tuple) else min(FIRST, len(listed))
        for index in range(count):
            if problem := _problem(listed[index]):
                raise DataError(f"{where}: prompt {index} is invalid: it {problem}")
        return listed


def _problem(prompt: Any) -> str | None:
    """Return a text that says what is wrong with a prompt."""
    if not isinstance(prompt, Prompt):
        return f"is of type {type(prompt).__name__}, not covey.Prompt"
    for name in ("id", "task", "target"):
        if not isinstance(value := getattr(prompt, name), str):
            return f"has {name} = {value!r}, which is not text"
    messages: Any = prompt.messages
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        return "has messages that are not a tuple of {'role': ..., 'content': ...}"
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return f"has the message {message!r}, which lacks 'role' or 'content'"
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            return f"has the message {message!r}, whose role or content is not text"
    return None
