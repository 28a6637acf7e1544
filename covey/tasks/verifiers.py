"""The `verifiers` task: the dataset of an environment made with the `verifiers` library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from covey.errors import ConfigError
from covey.tasks.task import SplitTask, chat_messages
from covey.trust import import_callable
from covey.types import Message, Prompt


@dataclass(frozen=True, kw_only=True)
class Verifiers(SplitTask):
    """Prompts from an environment package; the package's evaluation dataset is held out.

    Use this task with the reward `environment` and the environment `verifiers`, which must name the
    same package as the task.
    """

    package: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = "verifiers"

    @cached_property
    def _environment(self) -> Any:
        module = self.package.replace("-", "_")
        load = import_callable(f"{module}:load_environment", "task.package")
        environment = load(**self.arguments)
        if not hasattr(environment, "get_dataset"):
            raise ConfigError(
                f"task: {self.package} is not an environment for version 0.1 of the library "
                "verifiers, because it has no method get_dataset"
            )
        return environment

    def _prompts(self, split: str) -> list[Prompt]:
        made = self._environment
        # Without an evaluation dataset, the environment returns the training dataset.
        rows = made.get_dataset() if split == "train" else made.get_eval_dataset()
        return [self._prompt(split, number, dict(row)) for number, row in enumerate(rows)]

    def _prompt(self, split: str, number: int, row: dict[str, Any]) -> Prompt:
        given = row["prompt"]
        messages: tuple[Message, ...] = (
            chat_messages(given)
            if isinstance(given, str)
            else tuple({"role": m["role"], "content": m["content"] or ""} for m in given)
        )
        return Prompt(
            id=f"{self.package}/{split}/{number}",
            task=self.name,
            messages=messages,
            target=str(row.get("answer") or ""),
            info={"row": row},
        )
