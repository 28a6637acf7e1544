"""The `worlds` task: seeds from which environments such as `games` generate their worlds."""

from __future__ import annotations

from dataclasses import dataclass

from covey.tasks.task import GeneratedTask, chat_messages
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Worlds(GeneratedTask):
    """Prompts with equal text, each with a seed for the environment in `info["world"]`.

    No held-out world is used for training. The environment adds its rules to the prompt's text.
    """

    text: str = "Let us play a game. Use the tools to act."
    system: str = ""
    name: str = "worlds"

    def _prompt(self, split: str, index: int) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            task=self.name,
            messages=chat_messages(self.text, self.system),
            target="",
            info={"world": f"{split}/{index}"},
        )
