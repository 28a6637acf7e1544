"""Tasks of users: a wrong return type is one line that says what to return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from covey.errors import DataError
from covey.tasks.registry import UserTask
from covey.types import Prompt

ASKED: Any = ({"role": "user", "content": "1+1?"},)


def prompt(**changes: Any) -> Prompt:
    return Prompt(**{"id": "1", "task": "own", "messages": ASKED, "target": "2", **changes})


class Own:
    name = "own"

    def __init__(self, found: Any) -> None:
        self.found = found

    def train(self) -> Any:
        return self.found() if callable(self.found) else self.found

    held_out = train


def broken() -> Any:
    raise KeyError("column")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "returned NoneType; it must return a sequence of covey.Prompt"),
        ("text", "returned str"),
        (
            [{"prompt": "1+1?"}],
            "the prompt at index 0 is invalid: it is of type dict, not covey.Prompt",
        ),
        (
            [prompt(), prompt(target=2)],
            "the prompt at index 1 is invalid: it has target = 2, which is not text",
        ),
        ([prompt(messages="1+1?")], "messages that are not a tuple"),
        ([prompt(messages=({"role": "user"},))], "lacks 'role' or 'content'"),
        ([prompt(messages=({"role": "user", "content": 5},))], "role or content is not text"),
        (broken, r"raised an error: KeyError: 'column' \(.*test_user_task.py, line \d+\)"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(found: Any, said: str) -> None:
    task = UserTask(Own(found), "mine:own")
    with pytest.raises(DataError, match=f"^task: mine:own: train\\(\\).*{said}"):
        task.train()


def test_a_generator_becomes_a_list() -> None:
    def some() -> Iterator[Prompt]:
        yield prompt()

    assert UserTask(Own(some), "mine:own").held_out() == [prompt()]
