"""The task registry: built-in tasks by name, and user tasks by import path.

To add a task, write its class in this folder, as in `countdown.py`, and add it to `TASKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.errors import ConfigError, CoveyError, DataError, nearest, users_error
from covey.recipes.agent_calculator.environment import Products
from covey.recipes.agent_search.library import Library
from covey.recipes.games.environment import Worlds
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.code import Code
from covey.tasks.countdown import Countdown
from covey.tasks.gsm8k import Gsm8k
from covey.tasks.hub import Hub
from covey.tasks.instructions import Instructions
from covey.tasks.mixed import Mixed
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.rows import NAME as DATASET
from covey.tasks.rows import Jsonl
from covey.tasks.task import SplitTask, Task
from covey.tasks.tools import Tools
from covey.tasks.verifiers import Verifiers
from covey.trust import import_callable, is_import_path
from covey.types import Prompt

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "arithmetic": Arithmetic,
        "code": Code,
        "countdown": Countdown,
        "gsm8k": Gsm8k,
        "hub": Hub,
        "instructions": Instructions,
        "jsonl": Jsonl,
        "library": Library,
        "mixed": Mixed,
        "products": Products,
        "reasoning_gym": ReasoningGym,
        "tools": Tools,
        "verifiers": Verifiers,
        "worlds": Worlds,
    }
)

_GYM = "reasoning_gym:"


def is_user_task(name: str) -> bool:
    return is_import_path(name) and not name.startswith(_GYM)


def find_task(name: str, setting: str = "task.name") -> tuple[Callable[..., Task], dict[str, Any]]:
    """Return a task's constructor, and the options that the task's name implies.

    A task name is a key of `TASKS`, a dataset of reasoning_gym such as `reasoning_gym:chain_sum`,
    or the import path `my_package.module:function` of a user's task.

    >>> find_task("reasoning_gym:chain_sum")[1]
    {'dataset': 'chain_sum'}
    """
    if name in TASKS:
        return TASKS[name], {}
    if name.startswith(_GYM):
        return ReasoningGym, {"dataset": name.removeprefix(_GYM)}
    if is_user_task(name):
        return import_callable(name, setting), {}
    if name == DATASET:
        raise ConfigError(
            f"config: {setting} = {name!r} needs a dataset from Python; call covey.train(..., "
            "dataset=...) in Python, and add resume=RUN to resume a run"
        )
    hint = nearest(name, TASKS)
    raise ConfigError(f"config: {setting} = {name!r} is not a known task{hint}")


def make_task(name: str, options: Mapping[str, Any], setting: str = "task.name") -> Task:
    """Make a task from its name and resolved options, and check a user's task."""
    maker, _ = find_task(name, setting)
    if not is_user_task(name):
        return maker(**options)
    try:
        task = maker(**options)
    except CoveyError:
        raise
    except Exception as error:
        raise ConfigError(
            f"config: {setting} = {name!r} raised an error: {users_error(error)}"
        ) from error
    methods = all(callable(getattr(task, method, None)) for method in ("train", "held_out"))
    if not methods or not isinstance(getattr(task, "name", None), str):
        raise ConfigError(
            f"config: {setting} = {name!r} returned {type(task).__name__}, which is not a task; a "
            "task has a name, train() and held_out()"
        )
    return UserTask(task, name)


# A user's task, whose prompts are checked when they are read.

FIRST = 8
"""Number of prompts that are checked if a user's task generates prompts on access. If a user's task
returns a list of prompts, all prompts are checked."""


@dataclass(frozen=True, slots=True)
class UserTask(SplitTask):
    """Wraps a user's task, and raises an error for an invalid prompt."""

    task: Task
    path: str

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def bad_rows(self) -> Mapping[str, Sequence[str]]:
        """The bad rows that the user's task skipped; empty if the task does not list bad rows."""
        found: Mapping[str, Sequence[str]] = getattr(self.task, "bad_rows", {})
        return found

    def _prompts(self, split: str) -> Sequence[Prompt]:
        call = f"task: {self.path}: {split}()"
        try:
            found: Any = getattr(self.task, split)()
            listed = found if isinstance(found, Sequence) else None
            if listed is None and isinstance(found, Iterable):
                listed = list(found)
        except CoveyError:
            raise
        except Exception as error:
            raise DataError(f"{call} raised an error: {users_error(error)}") from error
        if listed is None or isinstance(listed, str | bytes):
            raise DataError(
                f"{call} returned {type(found).__name__}; it must return a sequence of covey.Prompt"
            )
        count = len(listed) if isinstance(listed, list | tuple) else min(FIRST, len(listed))
        for index in range(count):
            if problem := _problem(listed[index]):
                raise DataError(f"{call}: the prompt at index {index} is invalid: it {problem}")
        return listed


def _problem(prompt: Any) -> str | None:
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
