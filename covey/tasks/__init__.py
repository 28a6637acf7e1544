"""What is asked. No torch here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.tasks.arithmetic import Arithmetic
from covey.tasks.jsonl import Jsonl
from covey.tasks.task import Task

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {"arithmetic": Arithmetic, "jsonl": Jsonl}
)

__all__ = ["TASKS", "Arithmetic", "Jsonl", "Task"]
