"""The `verifiers` task: the dataset of an environment made with the `verifiers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from covey.errors import ConfigError
from covey.trust import import_callable
from covey.types import Message, Prompt


@dataclass(frozen=True, kw_only=True)
class Verifiers:
    """Prompts from an environment package; the package's evaluation dataset is held out.

    Use this task with the reward `environment` and the environment `verifiers`. The task and the
    environment must name the same package.
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
                f"task: {self.package} is not an environment for verifiers 0.1, because it has no "
                "get_dataset"
            )
        return environment

    def train(self) -> Sequence[Prompt]:
        """The rows of the environment package's training dataset."""
        return self._prompts("train", self._environment.get_dataset())

    def held_out(self) -> Sequence[Prompt]:
        """The rows of the package's evaluation dataset; the training rows if there is none."""
        return self._prompts("held_out", self._environment.get_eval_dataset())

    def _prompts(self, split: str, rows: Any) -> list[Prompt]:
        return [self._prompt(split, number, dict(row)) for number, row in enumerate(rows)]

    def _prompt(self, split: str, number: int, row: dict[str, Any]) -> Prompt:
        given = row["prompt"]
        messages: list[Message] = (
            [{"role": "user", "content": given}]
            if isinstance(given, str)
            else [{"role": m["role"], "content": m["content"] or ""} for m in given]
        )
        return Prompt(
            id=f"{self.package}/{split}/{number}",
            task=self.name,
            messages=tuple(messages),
            target=str(row.get("answer") or ""),
            info={"row": row},
        )
