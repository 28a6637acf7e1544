"""The single-turn environment: one prompt, one completion."""

from __future__ import annotations

from collections.abc import Sequence

from covey.types import Message, Prompt


class SingleTurn:
    """Shows the prompt and ends after one completion. It has no state, so one serves all."""

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return the messages of the prompt."""
        return prompt.messages

    def step(self, completion: str) -> None:
        """End the episode."""
