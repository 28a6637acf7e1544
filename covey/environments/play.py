"""Runs one episode with given policy turns, to test an environment without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.adapters import environment_factory
from covey.environments.calls import CALL_FORMATS, assistant_message
from covey.environments.host import Driver
from covey.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A played episode.

    An episode that `play` ran; `print` shows it as a conversation.
    """

    messages: tuple[Message, ...]
    outcome: Mapping[str, float] | None
    """The named terms of the environment's reward, or None if there was no reward."""
    error: str = ""
    """The message of the error that ended the episode; empty if there was no error."""

    def __str__(self) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in self.messages]
        lines += [] if self.outcome is None else [f"reward: {dict(self.outcome)}"]
        return "\n".join(lines + ([f"error: {self.error}"] if self.error else []))


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call, as a policy writes it.

    >>> call("add", a=1)
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    """
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{written}</tool_call>"


def play(
    environment: Callable[[], Any], prompt: Prompt, turns: Sequence[str], *, seed: int = 0
) -> Played:
    """Run an episode with the given policy turns, until the episode ends or no turns are left."""
    driver = Driver(environment_factory(environment))
    reply = driver.start(prompt, seed)
    messages = list(reply.messages)
    for text in turns:
        if reply.done:
            break
        message = assistant_message(text, CALL_FORMATS["hermes"], {})
        reply = driver.step(message)
        messages += [message, *reply.messages]
    if not reply.done:
        reply = driver.end()
    return Played(messages=tuple(messages), outcome=reply.outcome, error=reply.error)
