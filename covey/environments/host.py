"""Defines hosts, which run the episodes of environments in this process or in worker processes.

A host runs the commands start, step and end asynchronously, and returns the replies later. Tools
can therefore run during generation. The caller identifies each episode by an integer key.

Each worker process runs many episodes at the same time, and runs each step of an episode in a
thread. An episode is determined by the prompt, the seed and the policy's messages. If a worker
process dies or is killed, Covey can therefore replay the episodes of this process in a new process.
If the replies of a replayed episode differ from the original replies, the episode ends with an
error.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import wraps
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Literal, ParamSpec, Protocol

from covey.environments.environment import (
    Factory,
    as_messages,
    as_number,
    as_outcome,
    as_start,
    as_step,
    is_quick,
    prepare,
)
from covey.errors import ConfigError
from covey.types import Message, Prompt
from covey.workers import Pool

# Runs an episode: calls an environment, and converts results and errors to a `Reply`.


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
        """Pass a message of the policy to the environment."""
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


THREADS = 256
Replies = list[tuple[int, Reply]]
Op = Literal["start", "step", "end"]


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


@dataclass(slots=True)
class _Episode:
    prompt: Prompt
    seed: int
    op: Op = "start"
    """The current command, to which the environment has not yet replied."""
    messages: list[Message] = field(default_factory=list)
    """The policy's messages, including the message of the current command."""
    seen: str = ""
    """The digest of all replies that the environment has given in this episode."""
    process: int = -1
    """The number of the process that has the episode's state; in another, it is replayed."""

    def command(self, process: int, timeout: float) -> tuple[Any, float]:
        """Return the current command for a process, and its time limit."""
        live, self.process = self.process == process, process
        last = self.messages[-1] if self.op == "step" else None
        past = self.messages[:-1] if self.op == "step" else self.messages
        history = None if live else (self.prompt, self.seed, list(past))
        return (self.op, last, history), timeout * (1 if live else 1 + len(self.messages))


@dataclass(frozen=True, slots=True)
class _Environments:
    """What a worker process does: it runs the episodes of many environments."""

    factory: Factory

    def load(self) -> None:
        prepare(self.factory)

    def serve(self, connection: Connection, timeout: float) -> None:
        """Run each command in a thread; the async methods of all environments share one loop."""
        episodes: dict[int, Driver] = {}
        sending = threading.Lock()

        def run(number: int, key: int, op: Op, message: Any, history: Any) -> None:
            """Run a command and send the reply; with a `history`, first replay the episode."""
            past, reply = None, Reply()
            if history is not None:
                prompt, seed, messages = history
                episodes[key] = driver = Driver(self.factory)
                reply, past = driver.start(prompt, seed), ""
                for earlier in messages:
                    past, reply = chained(past, reply), driver.step(earlier)
                past = past if op == "start" else chained(past, reply)
            if op == "step":
                reply = episodes[key].step(message)
            elif op == "end":
                reply = episodes[key].end()
            if reply.done:
                episodes.pop(key, None)
            data = json.dumps({"number": number, "reply": asdict(reply), "past": past}).encode()
            with sending:
                connection.send_bytes(data)

        threads = ThreadPoolExecutor(THREADS)
        while True:
            commands = connection.recv()
            if not commands:
                episodes.clear()
            for number, (key, *command) in commands:
                threads.submit(run, number, key, *command)


def _decoded(data: bytes) -> tuple[int, tuple[Reply, str | None]]:
    """Parse and check a reply, because an environment's code can send invalid replies."""
    message = json.loads(data)
    return int(message["number"]), (read_reply(message["reply"]), message["past"])


class ProcessHost:
    """A host that runs environments in worker processes."""

    def __init__(
        self, name: str, factory: Factory, *, workers: int, timeout: float, gigabytes: float
    ) -> None:
        self.pool = Pool(
            _Environments(factory),
            f"environment {name}",
            workers=workers,
            timeout=timeout,
            gigabytes=gigabytes,
            process="its process",
            late="a step took",
            cannot=lambda why: ConfigError(f"environment {name}: a process cannot load it: {why}"),
            at_once=True,
            stream=True,
            decode=_decoded,
        )
        self._timeout = timeout
        self._episodes: dict[int, _Episode] = {}
        self._arrived: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()

    def load(self) -> None:
        """Start a worker process, to check that the environment can be loaded."""
        self.pool.start(1)

    def start(self, key: int, prompt: Prompt, seed: int) -> None:
        """Start an episode."""
        self._episodes[key] = _Episode(prompt, seed)
        self._submit(key)

    def step(self, key: int, message: Message) -> None:
        """Pass a message of the policy to an episode."""
        self._episodes[key].op = "step"
        self._episodes[key].messages.append(message)
        self._submit(key)

    def end(self, key: int) -> None:
        """End an episode that has reached a limit."""
        self._episodes[key].op = "end"
        self._submit(key)

    def _submit(self, key: int) -> None:
        episode = self._episodes[key]

        def command(process: int) -> tuple[Any, float]:
            content, seconds = episode.command(process, self._timeout)
            return (key, *content), seconds

        future = self.pool.submit(
            command,
            lambda why: (Reply(done=True, error=why), None),
            lane=key % len(self.pool.lanes),
        )
        future.add_done_callback(lambda done: self._arrived.put((key, done)))

    def replies(self, *, wait: bool) -> Replies:
        """Return the replies of environments that have arrived since the last call.

        If `wait` is true, wait for at least one reply.
        """
        found: Replies = []
        while True:
            try:
                key, future = self._arrived.get(block=wait and not found)
            except Empty:
                return found
            reply, past = future.result()
            episode = self._episodes[key]
            if past is not None and past != episode.seen:
                why = "a process was lost, and the replayed episode gave other replies"
                reply = Reply(done=True, error=why)
            episode.seen = chained(episode.seen, reply)
            found.append((key, reply))
            if reply.done:
                del self._episodes[key]

    def clear(self) -> None:
        """Remove all episodes, and kill the processes in which a command is still running."""
        self.pool.clear()
        self._arrived = SimpleQueue()
        self._episodes.clear()

    def close(self) -> None:
        """Kill the processes."""
        self.pool.close()
        self._episodes.clear()


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
    host = ProcessHost(
        name, factory, workers=workers or os.cpu_count() or 1, timeout=timeout, gigabytes=gigabytes
    )
    host.load()
    return host
