"""The native engine in a separate process: the trainer's side, which controls the process.

The process has its own copy of the model. The process receives new weights through shared memory,
and exchanges requests and completions with the trainer through a pipe. If the process dies, a new
process loads the same weights and generates the completions of the same requests again. The restart
therefore does not change the results of the run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from covey import errors
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import (
    Completion,
    EngineInfo,
    Request,
    RequestSource,
    Row,
    WeightSource,
)
from covey.errors import ModelError
from covey.subprocesses import PipedProcess

POLL_SECONDS = 0.005
"""Seconds between two calls of the request source's `take` during generation."""
MOST_DEATHS = 3
"""The run fails if the engine's process dies `MOST_DEATHS` times without a completion in
between."""


class _Process(PipedProcess):
    """A running engine process, with a pipe for requests and a pipe for control."""

    def __init__(self, module: str, setup: Any, weights: SharedWeights) -> None:
        shared = weights.handle.descriptor
        super().__init__(module, pipes=2, inherited=(shared,) if shared >= 0 else ())
        self.work, self.control = self.connections
        with contextlib.suppress(OSError):  # waiting for the reply raises if it has died
            self.control.send((setup, weights.handle, torch.get_num_threads()))


def _checked(connection: Connection) -> Any:
    """Receive a message, and raise it if it is an error; raise EOFError if the process has died."""
    try:
        kind, content = connection.recv()
    except ConnectionResetError:
        raise EOFError from None
    if kind == "error":
        name, message = content
        raise getattr(errors, name, ModelError)(message)
    return content


@dataclass(slots=True)
class ProcessEngine:
    """The native engine in another process on this machine."""

    module: str
    """The Python module that the engine's process runs; the module calls `worker.main`."""
    setup: Any
    """The data from which `module` builds the model."""
    weights: SharedWeights
    """Shared memory with the trainer's weights from the last call of `load_weights`."""
    version: int = 0
    process: _Process | None = field(init=False, default=None)
    told: EngineInfo | None = field(init=False, default=None)
    """Properties of the engine that do not change when it restarts."""
    ready: bool = field(init=False, default=False)
    """Whether the process has loaded its model and weights."""
    happened: list[str] = field(init=False, default_factory=list)
    preemptions: int = field(init=False, default=0)
    """Number of times so far that a completion was paused because the KV cache was full."""
    deaths: int = field(init=False, default=0)
    closed: int = field(init=False, default=0)
    """How many times the engine was closed; closing during `run` makes `run` fail."""
    lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    """A thread holds this lock while the process starts or loads weights."""

    def __post_init__(self) -> None:
        self.process = _Process(self.module, self.setup, self.weights)

    @property
    def info(self) -> EngineInfo:
        """Properties of the native engine in the other process."""
        if self.told is None:
            self._running()
        assert self.told is not None
        return self.told

    def _running(self) -> _Process:
        """Return the process once it has loaded its model and weights."""
        with self.lock:
            while True:
                if self.process is None:
                    self.process = _Process(self.module, self.setup, self.weights)
                process = self.process
                if self.ready:
                    return process
                try:
                    self.told = _checked(process.control)
                    self._load(process)
                    self.ready = True
                except (EOFError, OSError):
                    self._died(process)

    def _load(self, process: _Process) -> None:
        process.control.send(("load", self.version))
        assert _checked(process.control) == self.version, "the engine has loaded these weights"

    def _died(self, process: _Process) -> None:
        """Record that a process has died; the next use of the engine starts a new process."""
        with self.lock:
            if self.process is not process:
                return
            how = process.how_ended()
            process.kill()
            self.process, self.ready = None, False
            self.deaths += 1
            if self.deaths >= MOST_DEATHS:
                raise ModelError(
                    f"engine: the engine's process ended {self.deaths} times in a row, the last "
                    f"time {how}; see the messages above, and lower engine.max_concurrent if the "
                    "process ran out of memory"
                )
            self.happened.append(f"the engine's process ended {how} and was restarted")

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Write the weights into shared memory, and wait until the process has copied them."""
        with self.lock:
            process = self._running()  # until it confirms, the process may read the memory
            self.weights.write(weights())
            self.version = version
            try:
                self._load(process)
            except (EOFError, OSError):
                self._died(process)

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""
        if not requests.limits.requests:
            return
        work, closed = _Work(requests), self.closed
        while True:
            process = self._running()
            try:
                work.run(process.work)
                self.deaths = 0
                return
            except (EOFError, OSError):
                if self.closed != closed:
                    raise ModelError(
                        "engine: the engine was closed while it was generating completions"
                    ) from None
                if work.progress:
                    self.deaths = 0
                self._died(process)
            except BaseException:
                self.close()  # the process would continue with requests that are no longer needed
                raise
            finally:
                self.preemptions += work.paused

    def events(self) -> list[str]:
        """Return messages about restarts since the last call."""
        with self.lock:
            happened, self.happened = self.happened, []
        return happened

    def close(self) -> None:
        """End the process. If the engine is used again after `close`, a new process starts."""
        with self.lock:
            self.closed += 1
            if self.process is not None:
                self.process.kill()
            self.process, self.ready = None, False


@dataclass(slots=True)
class _Work:
    """The requests from one request source, with the indices of the completed requests."""

    source: RequestSource
    taken: dict[int, Request] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    progress: bool = False
    paused: int = 0
    """Number of preemptions in the current process."""

    def run(self, connection: Connection) -> None:
        """Let the process generate the completions of all requests.

        After a restart, the new process also repeats the requests that had already finished. The
        last bits of log-probabilities may depend on which completions are generated together.
        """
        self.progress, self.paused = False, 0
        if not self.taken:
            self._take()
        connection.send(("run", (self.source.limits, list(self.taken.values()))))
        running = set(self.taken)
        while running:
            if connection.poll(POLL_SECONDS):
                rows, self.paused = _checked(connection)
                running -= self._accept(rows)
            if more := self._take():
                connection.send(("more", more))
                running |= {request.number for request in more}
        connection.send(("end", None))

    def _take(self) -> list[Request]:
        more = list(self.source.take())
        self.taken |= {request.number: request for request in more}
        return more

    def _accept(self, rows: Sequence[Row]) -> set[int]:
        """Pass new completions to the request source; return the request indices of `rows`."""
        fresh = [row for row in rows if row[0] not in self.complete]
        new = [Completion.of(row, self.taken[row[0]]) for row in fresh]
        self.progress |= bool(new)  # repeated completions are no progress
        self.complete |= {completion.request.number for completion in new}
        self.source.done(new)
        return {row[0] for row in rows}
