"""The engine of a cluster, which distributes requests over engines in Ray actors.

All requests of a prompt go to the same actor. If an actor dies, a new actor repeats all requests of
the dead actor. If the cluster has no resources for a new actor, the remaining actors take over the
requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from covey.cluster.ray_client import LOOK_SECONDS, Need, check_cluster, dead, reachable, translated
from covey.engines.protocol import (
    Completion,
    Engine,
    EngineInfo,
    Limits,
    News,
    Request,
    RequestSource,
    Row,
    WeightSource,
)
from covey.errors import EngineError

# An engine in a Ray actor, which generates while the trainer adds requests and collects results.


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


CALLS = 4
"""The number of concurrent calls to an actor: one that waits for completions, and others that add
requests."""


@dataclass(slots=True, eq=False)
class Member:
    """A Ray actor with an engine, and the number of the actor in the run's messages."""

    number: int
    handle: Any
    ready: Any
    """The pending result of the actor's first call, which returns after the model has loaded."""
    preemptions: int = 0
    """The number of preemptions that the actor last reported."""


@dataclass(slots=True, kw_only=True)
class RayEngine:
    """An engine that distributes requests over engines in Ray actors."""

    build: Callable[[], Engine]
    """A function that builds the engine inside an actor."""
    engines: int
    most: int
    """Maximum number of engines. Engines are added when the cluster has free resources."""
    need: Need
    threads: int
    restarts: int
    patience: float
    members: list[Member] = field(default_factory=list, init=False)
    coming: Member | None = field(default=None, init=False)
    made: int = field(default=0, init=False)
    died: int = field(default=0, init=False)
    version: int = field(default=-1, init=False)
    preemptions: int = field(default=0, init=False)
    """How many times a completion was paused because the KV cache was full."""
    weights: Any = field(default=None, init=False)
    told: EngineInfo | None = field(default=None, init=False)
    happened: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.members = [self._make() for _ in range(self.engines)]

    def _make(self) -> Member:
        handle = self.need.actor(EngineActor, self.build, self.threads, max_concurrency=CALLS)
        self.made += 1
        return Member(self.made, handle, handle.info.remote())

    @property
    def info(self) -> EngineInfo:
        """The properties of the first engine, with the number of actors in `backend`."""
        if self.told is None:
            told = self._wait(self.members[0])
            backend = f"{len(self.members)} Ray actors, each: {told.backend}"
            self.told = replace(told, backend=backend, shares_weights=False, loads_in_flight=False)
        return self.told

    def _wait(self, member: Member) -> EngineInfo:
        """Wait until an actor has loaded its model."""
        import ray

        try:
            told: EngineInfo = ray.get(member.ready, timeout=self.patience)
            return told
        except ray.exceptions.GetTimeoutError:
            raise NoRoom(
                f"engine {member.number}: Ray did not start its actor within {self.patience:g} s; "
                "`ray status` shows the free resources"
            ) from None
        except ray.exceptions.RayError as error:
            raise translated(error, f"engine {member.number}") from None

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Put the weights into Ray's object store.

        The actors fetch the weights before they generate again.
        """
        import ray

        if version != self.version:
            self.weights, self.version = ray.put(pack_weights(weights())), version

    def events(self) -> list[str]:
        """Return messages about actors that died or joined since the last call."""
        happened, self.happened = self.happened, []
        return happened

    def close(self) -> None:
        """End all actors."""
        import ray

        if not reachable():
            return
        for member in (*self.members, *([self.coming] if self.coming else [])):
            ray.kill(member.handle)
        self.members, self.coming = [], None

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""
        if not requests.limits.requests:
            return
        check_cluster()
        self._grow()
        try:
            _Run(self, requests).run()
        except BaseException:
            self.close()  # otherwise actors would continue with requests that are no longer needed
            raise

    def _grow(self) -> None:
        """Start another engine if the cluster has free resources.

        The new engine gets requests only after it has loaded its model.
        """
        import ray

        if not self.members:
            self.members = [self._make() for _ in range(self.engines)]
        if self.coming is not None and ray.wait([self.coming.ready], timeout=0)[0]:
            self._add(self.coming)
            self.coming = None
        if self.coming is None and len(self.members) < self.most:
            free = ray.available_resources()
            room = (free.get("CPU", 0.0), free.get("GPU", 0.0))
            if room[0] >= self.need.cpus and room[1] >= self.need.gpus:
                self.coming = self._make()

    def _add(self, member: Member) -> None:
        """Add an engine whose actor has loaded its model, unless the actor has died."""
        import ray

        try:
            ray.get(member.ready)
        except ray.exceptions.RayError as error:
            if not dead(error):
                raise translated(error, f"engine {member.number}") from None
            self._count_death()
            self.happened.append(f"engine {member.number} died before it was ready")
            return
        self.members.append(member)
        engines = len(self.members)
        self.happened.append(News(f"engine {member.number} has joined; engines: {engines}"))

    def _count_death(self) -> None:
        self.died += 1
        if self.died > self.restarts:
            raise EngineError(
                f"engine: the Ray actors of the engine died {self.died} times in a row; `ray logs` "
                "shows why"
            )

    def replace(self, member: Member) -> Member | None:
        """Replace a dead actor.

        Return None if the cluster has no free resources for a new actor.
        """
        self._count_death()
        new = self._make()
        try:
            self._wait(new)
        except NoRoom:
            import ray

            ray.kill(new.handle)
            self.members.remove(member)
            if not self.members:
                raise
            self.happened.append(
                f"engine {member.number} died; the cluster has no room for a new one"
            )
            return None
        self.members[self.members.index(member)] = new
        self.happened.append(f"engine {member.number} died; engine {new.number} replaces it")
        return new


class NoRoom(EngineError):
    """Raised if the cluster has no free resources for an actor."""


@dataclass(slots=True, eq=False)
class _Share:
    """The requests that one actor gets. A thread runs `serve` to wait for the completions."""

    engine: RayEngine
    member: Member
    limits: Limits
    out: SimpleQueue[Any]
    requests: list[Request] = field(default_factory=list)
    begun: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, requests: Sequence[Request]) -> None:
        """Send requests to the actor.

        If the actor dies, its replacement gets all requests again.
        """
        with self.lock:
            self.requests += requests
            if self.begun:
                self.member.handle.add.remote(list(requests))

    def serve(self) -> None:
        """Put the actor's completions, or the error that stopped the actor, into the queue."""
        try:
            while not self._serve_once():
                pass
        except Exception as error:
            self.out.put(error)

    def count_preemptions(self, end: Any) -> None:
        """Add the actor's preemptions since its last report to the engine's count.

        `end` is the pending result of the actor's `end` method.
        """
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # it died after its last completion
            counted = ray.get(end)
            self.engine.preemptions += counted - self.member.preemptions
            self.member.preemptions = counted

    def _serve_once(self) -> bool:
        """Wait for all completions. Return False if a new actor must repeat the requests."""
        import ray

        engine, handle = self.engine, self.member.handle
        try:
            held = [engine.weights]
            version = ray.get(handle.begin.remote(engine.version, held, self.limits))
            assert version == engine.version, "an actor generates with the weights of its call"
            with self.lock:
                ray.get(handle.add.remote(list(self.requests)))
                self.begun = True
            while rows := ray.get(handle.collect.remote()):
                self.out.put(rows)
            return True
        except ray.exceptions.RayError as error:
            check_cluster(now=True)
            if not dead(error):
                raise translated(error, f"engine {self.member.number}") from None
        with self.lock:
            self.begun = False
        new = engine.replace(self.member)
        if new is None:
            self.out.put(self)
            return True
        self.member = new
        return False


class _Run:
    """Distributes the requests of one `RequestSource` over the actors."""

    def __init__(self, engine: RayEngine, source: RequestSource) -> None:
        self.engine, self.source = engine, source
        self.out: SimpleQueue[Any] = SimpleQueue()
        limits = source.limits
        self.shares = [_Share(engine, member, limits, self.out) for member in engine.members]
        self.waiting: dict[int, Request] = {}

    def run(self) -> None:
        """Generate completions until the request source has no more requests."""
        threads = [threading.Thread(target=share.serve, daemon=True) for share in self.shares]
        self._take()
        for thread in threads:
            thread.start()
        while self.waiting:
            self._hear()
            self._take()
        ends = [(share, share.member.handle.end.remote()) for share in self.shares]
        for thread in threads:
            thread.join()
        for share, end in ends:
            share.count_preemptions(end)

    def _hear(self) -> None:
        """Wait at most `poll_seconds` for completions or an error, and process them."""
        limit = self.source.limits.poll_seconds
        try:
            found = self.out.get(timeout=min(limit or LOOK_SECONDS, LOOK_SECONDS))
        except Empty:
            check_cluster()
            return
        if isinstance(found, Exception):
            check_cluster(now=True)  # which may be why
            raise found
        if isinstance(found, _Share):  # its actor died, and the other actors get its requests
            self.shares.remove(found)
            self._spread([r for r in found.requests if r.number in self.waiting])
            return
        # Repeated completions of a replaced actor were received before.
        fresh = [row for row in found if row[0] in self.waiting]
        if fresh:
            self.engine.died = 0
        self.source.done([Completion.of(row, self.waiting.pop(row[0])) for row in fresh])

    def _take(self) -> None:
        requests = list(self.source.take())
        self.waiting |= {request.number: request for request in requests}
        self._spread(requests)

    def _spread(self, requests: Sequence[Request]) -> None:
        count = len(self.shares)
        for place, share in enumerate(self.shares):
            if own := [r for r in requests if r.prompt % count == place]:
                share.add(own)
