"""An engine in a Ray actor, which generates while the trainer adds requests and collects results.

Each call of `begin` names the version of the weights to generate with. If the actor has a different
version, for example after a restart, the actor first fetches the requested version of the weights
from Ray's object store. The actor therefore never generates with a wrong version of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from covey.engines.protocol import Completion, Engine, EngineInfo, Limits, Request, Row

Packed = Mapping[str, tuple[np.ndarray, str]]
"""The format of weights in Ray's object store: a map from parameter names to bytes and dtypes."""


def pack_weights(weights: Any) -> dict[str, tuple[np.ndarray, str]]:
    """Return weights as arrays that Ray shares between processes without a copy."""
    packed = {}
    for name, weight in weights:
        plain = weight.detach().cpu().contiguous()
        array = plain.view(torch.uint8 if plain.dim() else plain.dtype)
        packed[name] = (array.numpy(), str(plain.dtype).removeprefix("torch."))
    return packed


def unpack_weights(packed: Packed) -> list[tuple[str, torch.Tensor]]:
    """Return copies of packed weights as tensors."""
    return [
        (name, torch.from_numpy(array.copy()).view(getattr(torch, dtype)))
        for name, (array, dtype) in packed.items()
    ]


class _Source:
    """Passes requests and completions between `EngineActor` and the thread that generates."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.changed = threading.Condition()
        self.ready: list[Request] = []
        self.running = 0
        self.rows: list[Row] = []
        self.ended = False
        self.error: BaseException | None = None

    def take(self) -> Sequence[Request]:
        """Return new requests. If the engine is idle, wait for requests or for a call of `end`."""
        with self.changed:
            while not (self.ready or self.running or self.ended):
                self.changed.wait()
            ready, self.ready = self.ready, []
            self.running += len(ready)
            return ready

    def done(self, completions: Sequence[Completion]) -> None:
        """Store completions until the trainer fetches them."""
        with self.changed:
            self.running -= len(completions)
            self.rows += [completion.row for completion in completions]
            self.changed.notify_all()


class EngineActor:
    """A Ray actor that generates completions for a trainer in another process."""

    def __init__(self, build: Callable[[], Engine], threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.engine = build()
        self.version = -1
        self.source: _Source | None = None
        self.thread: threading.Thread | None = None

    def info(self) -> EngineInfo:
        """Return the properties of the engine in this actor."""
        return self.engine.info

    def begin(self, version: int, held: Sequence[Any], limits: Limits) -> int:
        """Load a version of the weights and start the generating thread. Return the version.

        `held[0]` is Ray's object reference to the weights. The object reference is inside a list,
        because Ray would replace a bare object reference by the object itself.
        """
        if version != self.version:
            import ray

            packed = ray.get(held[0])
            self.engine.load_weights(lambda: unpack_weights(packed), version)
            self.version = version
        source = self.source = _Source(limits)

        def work() -> None:
            try:
                self.engine.run(source)
            except BaseException as error:
                with source.changed:
                    source.error = error
                    source.changed.notify_all()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        return self.version

    def add(self, requests: Sequence[Request]) -> None:
        """Give the engine more requests."""
        source = self._source()
        with source.changed:
            source.ready += requests
            source.changed.notify_all()

    def collect(self) -> list[Row]:
        """Wait for completions and return them; return an empty list after the last completion."""
        source = self._source()
        with source.changed:
            while not (source.rows or source.error or source.ended):
                source.changed.wait()
            if source.error is not None:
                raise source.error
            rows, source.rows = source.rows, []
            return rows

    def end(self) -> int:
        """Declare that no more requests will follow, and wait until the engine has finished.

        Return the engine's number of preemptions since the actor started.
        """
        source = self._source()
        with source.changed:
            source.ended = True
            source.changed.notify_all()
        if self.thread is not None:
            self.thread.join()
        return self.engine.preemptions

    def _source(self) -> _Source:
        assert self.source is not None, "begin comes first"
        return self.source
