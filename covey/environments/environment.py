"""The environment protocol: messages in, completions out, no token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from covey.types import Message, Prompt


class Environment(Protocol):
    """Turns a prompt into an episode. The rollout package does templates, tokens and masks."""

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Start an episode: return the messages that the policy sees first."""

    def step(self, completion: str) -> Sequence[Message] | None:
        """Return the messages that follow a completion. None: the episode is done."""
