"""The worker process of an engine: it generates completions for a trainer's process.

The worker ends when the trainer closes the pipes, which also happens if the trainer is killed.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from covey.engines.native.engine import NativeCopy
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import Completion, Limits, Request
from covey.errors import CoveyError


def main(build: Callable[[Any], NativeCopy]) -> None:
    """Run the engine that `build` returns; `sys.argv` contains two pipes to the trainer."""
    work, control = (Connection(int(number)) for number in sys.argv[1:3])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        setup, handle, threads = control.recv()
        torch.set_num_threads(threads)
        with _told(control):
            worker = _Worker(build(setup), SharedWeights.open(handle), work, control)
            control.send(("info", replace(worker.engine.info, loads_in_flight=True)))
            worker.serve()


@contextlib.contextmanager
def _told(connection: Connection) -> Iterator[None]:
    """Send any exception inside a `with` block to the trainer, which raises it again."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        name, text = type(error).__name__, str(error)
        if not isinstance(error, CoveyError):
            traceback.print_exc()
            name, text = "ModelError", f"engine: the engine's process failed: {name}: {text}"
        connection.send(("error", (name, text)))


@dataclass(slots=True)
class _Worker:
    engine: NativeCopy
    shared: SharedWeights
    work: Connection
    control: Connection

    def load(self) -> None:
        """Load the weights that the trainer wrote to shared memory, and send a confirmation."""
        _, version = self.control.recv()
        self.engine.load_weights(self.shared.weights, version)
        self.control.send(("loaded", version))

    def serve(self) -> None:
        """Load weights and generate until the pipes close."""
        while True:
            ready = wait([self.control, self.work])
            if self.control in ready:
                self.load()
                continue
            limits, requests = self.work.recv()[1]
            with _told(self.work):
                self.engine.run(_Remote(self, limits, requests, self.engine.preemptions))


@dataclass(slots=True)
class _Remote:
    """The trainer's request source, which the worker process reads through a pipe."""

    worker: _Worker
    limits: Limits
    ready: list[Request]
    paused_before: int
    """The engine's number of preemptions before this call of `run`."""
    running: int = 0
    ended: bool = False

    def take(self) -> Sequence[Request]:
        """Return the requests that have arrived; load new weights if the trainer has sent any.

        Wait if no completion is in progress and the trainer may send more requests.
        """
        work, control = self.worker.work, self.worker.control
        while True:
            idle = not (self.ready or self.running or self.ended)
            arrived = wait([work, control], None if idle else 0)
            if control in arrived:
                self.worker.load()
            elif work in arrived and not self.ended:
                kind, content = work.recv()
                self.ended = kind == "end"
                self.ready += content or ()
            else:
                break
        ready, self.ready = self.ready, []
        self.running += len(ready)
        return ready

    def done(self, completions: Sequence[Completion]) -> None:
        """Send completions to the trainer, with the number of preemptions in this call of `run`."""
        self.running -= len(completions)
        paused = self.worker.engine.preemptions - self.paused_before
        self.worker.work.send(("done", ([completion.row for completion in completions], paused)))
