"""Defines the interface of environments: the methods that turn a prompt into an episode.

An environment sees messages and never token ids. Each rollout has its own instance of the
environment. All methods of an environment may be plain or async. An exception in a method ends the
rollout with the finish reason `error` and without a reward.

    class GuessNumber:
        def reset(self, prompt, seed):
            self.number = random.Random(seed).randint(1, 100)
            return prompt.messages

        def step(self, message):
            guess = int(message["content"])
            if guess == self.number:
                return None                                            # the episode is done
            hint = "higher" if guess < self.number else "lower"
            return [{"role": "user", "content": hint}]

        def reward(self):                                              # optional
            return 1.0
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first messages, the tools and the first state of an episode."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, for the chat template."""
    state: Any = None
    """Data that identifies the state at the start of the episode; see `Step.state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's reply to a message of the policy.

    Instead of a `Step`, `Environment.step` may return only the messages, or None to end the
    episode.
    """

    messages: Sequence[Message] = ()
    """The messages that the policy sees next; empty if the episode has ended."""
    reward: float | None = None
    done: bool = False
    state: Any = None
    """Data that identifies the environment's state after this step, for algorithms that compare
    steps from equal states. If `state` is None, Covey identifies the state by the step's messages.
    """


class Environment(Protocol):
    """The interface of an environment, whose instance runs one episode."""

    def reset(
        self, prompt: Prompt, seed: int
    ) -> Start | Sequence[Message] | Awaitable[Start | Sequence[Message]]:
        """Start the episode; all rollouts of a group get the same seed."""

    def step(
        self, message: Message
    ) -> Step | Sequence[Message] | Awaitable[Step | Sequence[Message] | None] | None:
        """Reply to a message of the policy; return the next messages, or None to end the episode.

        The message has `role`, `content` and, if the text has tool calls, `tool_calls`. Each tool
        call has the format of chat templates, with `name` and `arguments` inside `function`. A tool
        call that cannot be parsed has the key `error`, which contains the reason.
        """


Factory = Callable[[], Any]
"""A function that makes the environment of one rollout. The function must be picklable, unless the
environment has `quick = True`."""


def prepare(factory: Factory) -> None:
    """Load the data that all episodes of an environment class share, once in each process.

    To load the data, call the class method `prepare`, if the environment class has this method.
    """
    kind = getattr(factory, "func", factory)
    if hasattr(kind, "prepare"):
        kind.prepare(**getattr(factory, "keywords", {}))


def is_quick(factory: Factory) -> bool:
    """Return whether an environment declares with `quick = True` that it is fast and never crashes.

    Environments with `quick = True` run in this process. Environments without `quick = True` run in
    worker processes with limits on time and memory.
    """
    made = getattr(factory, "func", factory)
    return bool(getattr(made, "quick", False))


def appended(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text appended to the last message."""
    *before, last = messages
    return [*before, {**last, "content": last["content"] + text}]


def as_start(value: Any) -> Start:
    """Make a `Start` from the result of `reset`, which may be messages or (messages, tools)."""
    if isinstance(value, Start):
        return value
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], Mapping):
        return Start(messages=value[0], tools=value[1])
    return Start(messages=value)


def as_step(value: Any) -> Step:
    """Make a `Step` from the result of `step`, which may be messages, or None to end an episode."""
    if isinstance(value, Step):
        return value
    return Step(done=True) if value is None else Step(messages=value)


def as_outcome(value: Any) -> dict[str, float] | None:
    """Convert an environment's reward to a dict of named terms, whose sum is the reward."""
    if value is None:
        return None
    parts = value if isinstance(value, Mapping) else {"environment": value}
    return {str(name): as_number(part) for name, part in parts.items()}


def as_number(value: Any) -> float:
    """Convert a reward to a float; raise ValueError if the reward is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def as_messages(value: Any, most: int | None = None) -> tuple[Message, ...]:
    """Return messages as plain dictionaries, with each content cut to `most` characters."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"an environment must return a list of messages, not {type(value).__name__}"
        )
    return tuple(_as_message(message, most) for message in value)


def _as_message(message: Any, most: int | None) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise TypeError(f"a message has role and content, unlike {str(message)[:100]!r}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError("the role and the content of a message must be text")
    if most is not None and len(content) > most:
        content = f"{content[:most]}\n[{len(content) - most} more characters]"
    # JSON, files and tokenizers reject lone surrogates.
    content = content.encode("utf-8", "replace").decode()
    return {**{k: message[k] for k in ("name", "tool_call_id") if isinstance(message.get(k), str)},
            "role": role, "content": content}  # fmt: skip
