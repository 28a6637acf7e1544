"""Runs environments in worker processes, with limits on time and memory.

Each process runs many episodes at the same time, and runs each step of an episode in a thread. An
episode is determined by the prompt, the seed and the policy's messages. If a worker process dies or
is killed, Covey can therefore replay the episodes of this process in a new process. If the replies
of a replayed episode differ from the original replies, the episode ends with an error.

If a step takes too long, its episode ends with an error. If several steps were running when a
process died, Covey retries the steps one at a time, to find the step that killed the process. If
only one step was running when a process died, the episode of that step ends with an error.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from typing import Any, Literal

from covey.environments.drive import Reply, chained, read_reply
from covey.environments.environment import Factory
from covey.environments.host import Replies
from covey.errors import ConfigError, RewardError
from covey.scoring.pool import Worker
from covey.subprocesses import pickled
from covey.types import Message, Prompt

LONGEST = 64 * 2**20
"""Maximum size of a reply, in bytes."""
Op = Literal["start", "step", "end"]


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
    live: bool = False
    """Whether the worker process has the episode's state; otherwise, the episode is replayed."""
    deadline: float = 0.0

    def command(self, key: int) -> tuple[Any, ...]:
        """Return the current command in the format that a worker process receives."""
        last = self.messages[-1] if self.op == "step" else None
        past = self.messages[:-1] if self.op == "step" else self.messages
        return key, self.op, last, None if self.live else (self.prompt, self.seed, list(past))


@dataclass(slots=True)
class _Lane:
    """One worker of the pool, with its process (if started) and the keys of its episodes."""

    worker: Worker | None = None
    queue: deque[int] = field(default_factory=deque)
    running: dict[int, None] = field(default_factory=dict)
    alone: deque[int] = field(default_factory=deque)
    """The keys of the episodes whose commands were running when the process died. If a process
    dies, Covey retries its running commands one at a time."""


class ProcessHost:
    """A host that runs environments in worker processes."""

    def __init__(
        self, name: str, factory: Factory, *, workers: int, timeout: float, gigabytes: float
    ) -> None:
        self._payload = pickled(factory, f"environment {name}")
        self._name, self._timeout, self._gigabytes = name, timeout, gigabytes
        self._lanes = [_Lane() for _ in range(workers)]
        self._episodes: dict[int, _Episode] = {}
        self._ready: Replies = []

    def load(self) -> None:
        """Start a worker process, to check that the environment can be loaded."""
        self._started(self._lanes[0])

    def start(self, key: int, prompt: Prompt, seed: int) -> None:
        """Start an episode."""
        self._episodes[key] = _Episode(prompt, seed)
        self._enqueue(key)

    def step(self, key: int, message: Message) -> None:
        """Pass a message of the policy to an episode."""
        self._episodes[key].op = "step"
        self._episodes[key].messages.append(message)
        self._enqueue(key)

    def end(self, key: int) -> None:
        """End an episode that has reached a limit."""
        self._episodes[key].op = "end"
        self._enqueue(key)

    def clear(self) -> None:
        """Remove all episodes, and kill the processes in which a command is still running."""
        for lane in self._lanes:
            if lane.running:
                self._kill(lane)
            elif lane.worker is not None:
                with contextlib.suppress(OSError):  # the process died while it was idle
                    lane.worker.connection.send(None)
            lane.queue.clear()
            lane.alone.clear()
        self._episodes.clear()
        self._ready.clear()

    def close(self) -> None:
        """Kill the processes."""
        for lane in self._lanes:
            self._kill(lane)
        self._episodes.clear()

    def replies(self, *, wait: bool) -> Replies:
        """Return the replies of environments that have arrived since the last call.

        If `wait` is true, wait for at least one reply.
        """
        while True:
            self._receive(self._patience() if wait and not self._ready else 0.0)
            self._give_up_overdue()
            if self._ready or not wait:
                found, self._ready = self._ready, []
                return found

    def _lane(self, key: int) -> _Lane:
        return self._lanes[key % len(self._lanes)]

    def _enqueue(self, key: int) -> None:
        lane = self._lane(key)
        lane.queue.append(key)
        self._send(lane)

    def _send(self, lane: _Lane) -> None:
        """Send all waiting commands to a worker process.

        If the previous process died, first retry its running commands one at a time.
        """
        while (lane.alone and not lane.running) or (lane.queue and not lane.alone):
            key = (lane.alone or lane.queue).popleft()
            episode = self._episodes[key]
            try:
                worker = self._started(lane)
            except ConfigError as error:
                self._fail(key, str(error))
                continue
            command = episode.command(key)
            steps = 1 if episode.live else 1 + len(episode.messages)
            episode.deadline = time.monotonic() + steps * self._timeout
            episode.live = True
            lane.running[key] = None
            try:
                worker.connection.send(command)
            except OSError:
                self._lost(lane)

    def _started(self, lane: _Lane) -> Worker:
        if lane.worker is not None and not lane.running and lane.worker.process.poll() is not None:
            self._kill(lane)  # the process died while it was idle
        if lane.worker is None:
            worker = Worker(
                self._payload, self._gigabytes, self._timeout, module="covey.environments.worker"
            )
            try:
                worker.load()
            except RewardError as error:
                worker.kill()
                why = str(error).partition(": ")[2]
                raise ConfigError(f"environment {self._name}: {why}") from None
            lane.worker = worker
        return lane.worker

    def _kill(self, lane: _Lane) -> None:
        """Kill a worker process, and mark its episodes for replay."""
        if lane.worker is not None:
            lane.worker.kill()
        lane.worker = None
        lane.running.clear()
        for key, episode in self._episodes.items():
            if self._lane(key) is lane:
                episode.live = False

    def _patience(self) -> float:
        """Return the seconds until the earliest deadline of a running command."""
        running = [key for lane in self._lanes for key in lane.running]
        nearest = min((self._episodes[key].deadline for key in running), default=0.0)
        return max(0.0, nearest - time.monotonic())

    def _receive(self, seconds: float) -> None:
        """Wait up to `seconds` seconds for a reply, and receive all replies that have arrived."""
        lanes = {lane.worker.connection: lane for lane in self._lanes if lane.worker is not None}
        for connection in wait_for(list(lanes), seconds):
            lane = lanes[connection]  # type: ignore[index]
            while lane.worker is not None and lane.worker.connection.poll():
                try:
                    self._take(lane, lane.worker.connection.recv_bytes(LONGEST))
                except (EOFError, OSError, ValueError, KeyError, TypeError):
                    self._lost(lane)

    def _take(self, lane: _Lane, data: bytes) -> None:
        """Parse and check a reply, because an environment's code can send invalid replies."""
        message = json.loads(data)
        key, reply = int(message["key"]), read_reply(message["reply"])
        del lane.running[key]
        episode = self._episodes[key]
        if message["past"] is not None and message["past"] != episode.seen:
            self._fail(key, "a process was lost, and the replayed episode gave other replies")
        else:
            episode.seen = chained(episode.seen, reply)
            self._ready.append((key, reply))
            if reply.done:
                del self._episodes[key]
        self._send(lane)

    def _lost(self, lane: _Lane) -> None:
        """Handle the death of a worker process.

        If one command was running, its episode ends with an error. If several commands were
        running, Covey retries these commands one at a time.
        """
        assert lane.worker is not None
        how, suspects = lane.worker.how_ended(), list(lane.running)
        self._kill(lane)
        if len(suspects) == 1:
            self._fail(suspects[0], f"its process ended {how}")
        else:
            lane.alone.extend(suspects)
        self._send(lane)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for lane in self._lanes:
            late = [key for key in lane.running if self._episodes[key].deadline <= now]
            if late:
                others = [key for key in lane.running if key not in late]
                self._kill(lane)
                for key in late:
                    self._fail(key, f"a step took longer than {self._timeout:g} seconds")
                lane.queue.extendleft(reversed(others))
                self._send(lane)

    def _fail(self, key: int, why: str) -> None:
        del self._episodes[key]
        self._ready.append((key, Reply(done=True, error=why)))
