"""Runs an episode: calls an environment, and converts results and errors to a `Reply`.

Environments with `quick = True` run in the process that makes the rollouts. Environments without
`quick = True` run in worker processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, ParamSpec

from covey.environments.environment import (
    Factory,
    as_messages,
    as_number,
    as_outcome,
    as_start,
    as_step,
)
from covey.types import Message, Prompt

MOST_CHARACTERS = 20_000
"""Maximum number of characters in an environment's message; longer messages are cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply, in a form that can be converted to JSON."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    """The reward of this turn; None if the environment gives no reward for the turn."""
    state: str = ""
    """A digest of the environment's state after this reply."""
    done: bool = False
    outcome: Mapping[str, float] | None = None
    """The named terms of the environment's reward for the whole episode, or None if the episode has
    not ended or has no reward."""
    error: str = ""
    """The message of the error that ended the episode; empty if there was no error. An episode that
    ends with an error has no reward."""


def read_reply(data: Mapping[str, Any]) -> Reply:
    """Parse a reply from JSON data; raise ValueError, KeyError or TypeError for invalid data."""
    outcome, reward = data["outcome"], data["reward"]
    return Reply(
        messages=as_messages(data["messages"]),
        tools=tuple(dict(tool) for tool in data["tools"]),
        reward=None if reward is None else as_number(reward),
        state=str(data["state"]),
        done=bool(data["done"]),
        outcome=None if outcome is None else as_outcome(dict(outcome)),
        error=str(data["error"]),
    )


def chained(seen: str, reply: Reply) -> str:
    """Update the digest of all earlier replies with a new reply, and return the new digest."""
    text = seen + json.dumps(asdict(reply), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_loops: list[asyncio.AbstractEventLoop] = []
_making_loop = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the only event loop for async environment methods, which runs in its own thread."""
    with _making_loop:  # episodes start in several threads; locks of environments know one loop
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, daemon=True, name="environments").start()
        return _loops[0]


def _settled(value: Any) -> Any:
    """Return the result of an environment's method; if the method is async, wait for the result."""
    if not inspect.isawaitable(value):
        return value

    async def settled() -> Any:
        return await value

    return asyncio.run_coroutine_threadsafe(settled(), _loop()).result()


Given = ParamSpec("Given")


def _guarded(run: Callable[Given, Reply]) -> Callable[Given, Reply]:
    """Wrap a method so that every exception becomes a reply that ends the episode."""

    @wraps(run)
    def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Reply:
        try:
            return run(*args, **kwargs)
        except Exception as error:  # an environment may raise any error, which ends its rollout
            return Reply(done=True, error=f"{type(error).__name__}: {str(error)[:500]}")

    return guarded


@dataclass(slots=True)
class Driver:
    """Runs the episode of one environment.

    The methods of a `Driver` may block, so do not call them from the thread that runs the event
    loop for async methods.
    """

    factory: Factory
    environment: Any = field(init=False, default=None)

    @_guarded
    def start(self, prompt: Prompt, seed: int) -> Reply:
        """Make the environment and start its episode."""
        self.environment = self.factory()
        start = as_start(_settled(self.environment.reset(prompt, seed)))
        messages = as_messages(start.messages)
        tools = json.loads(json.dumps(list(start.tools)))
        return Reply(messages=messages, tools=tuple(tools), state=_digest(start.state, messages))

    @_guarded
    def step(self, message: Message) -> Reply:
        step = as_step(_settled(self.environment.step(message)))
        messages = as_messages(step.messages, MOST_CHARACTERS)
        done = step.done or not messages
        return Reply(
            messages=messages,
            reward=None if step.reward is None else as_number(step.reward),
            state=_digest(step.state, messages),
            done=done,
            outcome=self._outcome() if done else None,
        )

    @_guarded
    def end(self) -> Reply:
        """End an episode that has reached a limit, and return its reward."""
        return Reply(done=True, outcome=self._outcome())

    def _outcome(self) -> dict[str, float] | None:
        reward = getattr(self.environment, "reward", None)
        return as_outcome(_settled(reward())) if callable(reward) else None


def _digest(state: Any, messages: tuple[Message, ...]) -> str:
    shown = messages if state is None else state
    text = json.dumps(shown, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
