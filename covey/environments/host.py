"""Defines hosts, which run the episodes of environments in this process or in worker processes.

A host runs the commands start, step and end asynchronously, and returns the replies later. Tools
can therefore run during generation. The caller identifies each episode by an integer key.
"""

from __future__ import annotations

import os
from typing import Protocol

from covey.environments.drive import Driver, Reply
from covey.environments.environment import Factory, is_quick, prepare
from covey.types import Message, Prompt

Replies = list[tuple[int, Reply]]


class Host(Protocol):
    """Runs the episodes of many rollouts, and returns one reply to each command."""

    def start(self, key: int, prompt: Prompt, seed: int) -> None:
        """Start an episode."""

    def step(self, key: int, message: Message) -> None:
        """Pass a message of the policy to an episode."""

    def end(self, key: int) -> None:
        """End an episode that has reached a limit."""

    def replies(self, *, wait: bool) -> Replies:
        """Return the replies of environments that have arrived since the last call.

        If `wait` is true, wait for at least one reply.
        """

    def clear(self) -> None:
        """Remove all episodes, so that the caller can reuse their keys."""

    def close(self) -> None:
        """End all episodes and their processes."""


class InlineHost:
    """Runs environments with `quick = True` in this process, while the caller waits."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._episodes: dict[int, Driver] = {}
        self._replies: Replies = []

    def start(self, key: int, prompt: Prompt, seed: int) -> None:
        self._episodes[key] = driver = Driver(self._factory)
        self._add(key, driver.start(prompt, seed))

    def step(self, key: int, message: Message) -> None:
        self._add(key, self._episodes[key].step(message))

    def end(self, key: int) -> None:
        self._add(key, self._episodes[key].end())

    def _add(self, key: int, reply: Reply) -> None:
        if reply.done:
            del self._episodes[key]
        self._replies.append((key, reply))

    def replies(self, *, wait: bool) -> Replies:
        replies, self._replies = self._replies, []
        return replies

    def clear(self) -> None:
        self._episodes.clear()
        self._replies.clear()

    def close(self) -> None:
        self.clear()


def make_host(
    name: str,
    factory: Factory,
    *,
    workers: int = 0,
    timeout: float = 30.0,
    gigabytes: float = 8.0,
) -> Host:
    """Return an `InlineHost` for quick environments, and a `ProcessHost` for other environments."""
    if is_quick(factory):
        prepare(factory)
        return InlineHost(factory)
    from covey.environments.pool import ProcessHost

    host = ProcessHost(
        name, factory, workers=workers or os.cpu_count() or 1, timeout=timeout, gigabytes=gigabytes
    )
    host.load()
    return host
