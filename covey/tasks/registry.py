"""Tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from covey.dotted import is_dotted, load_dotted
from covey.errors import ConfigError, CoveyError, nearest
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.code import Code
from covey.tasks.countdown import Countdown
from covey.tasks.gsm8k import Gsm8k
from covey.tasks.hub import Hub
from covey.tasks.jsonl import Jsonl
from covey.tasks.mixed import Mixed
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.task import Task
from covey.tasks.tools import Tools

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "arithmetic": Arithmetic,
        "code": Code,
        "countdown": Countdown,
        "gsm8k": Gsm8k,
        "hub": Hub,
        "jsonl": Jsonl,
        "mixed": Mixed,
        "reasoning_gym": ReasoningGym,
        "tools": Tools,
    }
)

_GYM = "reasoning_gym:"


def is_own_task(name: str) -> bool:
    """Tell whether a name is the path of a user's own task, which would have to be imported."""
    return is_dotted(name) and not name.startswith(_GYM)


def find_task(name: str, where: str = "task.name") -> tuple[Callable[..., Task], dict[str, Any]]:
    """Return what builds a task of that name, and the options that the name itself gives.

    A name is one of TASKS, `reasoning_gym:chain_sum` for one of its data sets, or the path
    `my_package.module:function` of a user's own task.

    >>> find_task("reasoning_gym:chain_sum")[1]
    {'dataset': 'chain_sum'}
    """
    if name in TASKS:
        return TASKS[name], {}
    if name.startswith(_GYM):
        return ReasoningGym, {"dataset": name.removeprefix(_GYM)}
    if is_own_task(name):
        return load_dotted(name, where), {}
    raise ConfigError(f"config: {where} = {name!r} is not known{nearest(name, TASKS)}")


def make_task(name: str, options: Mapping[str, Any], where: str = "task.name") -> Task:
    """Make the task of a name with its resolved options; a user's own must turn out to be one."""
    maker, _ = find_task(name, where)
    if not is_own_task(name):
        return maker(**options)
    try:
        task = maker(**options)
    except CoveyError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"config: {where} = {name!r} fails: {what}") from error
    methods = all(callable(getattr(task, method, None)) for method in ("train", "held_out"))
    if not methods or not isinstance(getattr(task, "name", None), str):
        raise ConfigError(
            f"config: {where} = {name!r} gives no task but {type(task).__name__}: a task has a "
            "name, train() and held_out()"
        )
    return task
