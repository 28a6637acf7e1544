"""Stores the completions of the first training step, so that all arms of a comparison share them.

Before the first optimizer step, runs with the same seed have the same weights, prompts and random
numbers. On a GPU, rounding errors can change the completions that a run samples in the first step.
To make the completions equal, the first run that needs a completion stores it, and later runs read
the stored completion. The name of each file contains a digest of all settings that determine the
completions in the file, so that no run reads completions that were generated with different
settings. In a multi-turn episode, each turn is a separate request with its own completion.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.engines.protocol import (
    Completion,
    Engine,
    EngineInfo,
    Limits,
    Request,
    RequestSource,
    WeightSource,
)
from covey.evaluation.evaluate import EVALUATION_STEP
from covey.records.files import write_text
from covey.records.records import Row, is_missing, read_lines
from covey.types import VersionSpan


@dataclass(slots=True, kw_only=True)
class SharedEngine:
    """An engine that shares the first step's completions with other runs of the same seed."""

    engine: Engine
    folder: Path
    start: str
    """The digest of the policy before training: its weights, dtype, device and adapter."""
    names_file: Path
    """The file in which this run lists the stored completions that its first step used."""
    names: list[str] = field(default_factory=list)
    """The file names, without suffix, of the stored completions that this run used."""
    version: int = 0

    @property
    def info(self) -> EngineInfo:
        """The properties of the wrapped engine."""
        return self.engine.info

    @property
    def preemptions(self) -> int:
        """The number of preemptions in the wrapped engine so far."""
        return self.engine.preemptions

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Load new weights into the wrapped engine."""
        self.version = version
        self.engine.load_weights(weights, version)

    def events(self) -> list[str]:
        """Return the events of the wrapped engine."""
        return self.engine.events()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def run(self, requests: RequestSource) -> None:
        """Read stored completions from a file; generate and store all other completions."""
        first = requests.take() if self.version == 0 and requests.limits.requests else ()
        if not first:
            self.engine.run(requests)
            return
        limits, step = requests.limits, first[0].address.step
        # Multi-turn episodes make requests in any order, so all their requests share one file.
        file = self.folder / f"{self._name([] if limits.steady else first, limits, step)}.jsonl"
        with _alone(file):
            known = _read(file)
            source = _SharedSource(source=_Begun(requests, first), stored=dict(known))
            # An engine allocates memory when it runs, so it runs only if it has to generate.
            if ready := source.take():
                self.engine.run(_Begun(source, ready))
            taken = {key: source.stored[key] for key in map(_key, source.taken)}
            if taken.keys() - known.keys():
                _write(file, {**known, **taken}.values())
        name = self._name(source.taken, limits, step)
        if step != EVALUATION_STEP and name not in self.names:
            self.names.append(name)
            write_text(self.names_file, json.dumps(self.names) + "\n")

    def _name(self, requests: Sequence[Request], limits: Limits, step: int) -> str:
        settings = asdict(limits.sampling)
        for name in ("max_concurrent", "cache_gigabytes"):  # they do not change completions
            del settings[name]
        greedy, seed = limits.sampling.distribution.temperature == 0.0, limits.sampling.seed
        if greedy:
            settings["seed"] = None  # greedy generation draws no random numbers
        if limits.steady:
            prompts: list[object] = [*sorted(map(_key, requests))]
        else:
            by_prompt = {r.prompt: (r.address.prompt, r.tokens) for r in requests}
            prompts = [*by_prompt.values()]
        name = "evaluation" if step == EVALUATION_STEP else f"step-{step}"
        tail = "" if greedy else f"-seed-{seed}"
        decisive = json.dumps([self.start, prompts, step, settings], sort_keys=True)
        return f"{name}{tail}-{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"


def _key(request: Request) -> str:
    """Return a digest of a request, by which its completion is stored.

    The digest leaves out the seed, because greedy completions are the same for all seeds.
    """
    _, *place = request.address
    return hashlib.sha256(json.dumps([place, request.tokens]).encode()).hexdigest()


@dataclass(slots=True)
class _Begun:
    """A request source that first returns the requests in `first`, and then the requests of
    `source`."""

    source: RequestSource
    first: Sequence[Request]

    @property
    def limits(self) -> Limits:
        return self.source.limits

    def take(self) -> Sequence[Request]:
        first, self.first = self.first, ()
        return first or self.source.take()

    def done(self, completions: Sequence[Completion]) -> None:
        self.source.done(completions)


@dataclass(slots=True, kw_only=True)
class _SharedSource:
    """A request source that answers stored requests itself, and stores all other completions.

    Each turn of a multi-turn episode is a request of its own. If a tool replies differently than in
    the stored episode, the engine generates the next turn.
    """

    source: RequestSource
    stored: dict[str, Row]
    """The stored completions, by the digests of their requests."""
    taken: list[Request] = field(default_factory=list)

    @property
    def limits(self) -> Limits:
        return self.source.limits

    def take(self) -> Sequence[Request]:
        while requests := self.source.take():
            self.taken += requests
            known = [request for request in requests if _key(request) in self.stored]
            if known:
                self.source.done([_completion(self.stored[_key(r)], r) for r in known])
            if len(known) < len(requests):
                return [request for request in requests if _key(request) not in self.stored]
        return ()

    def done(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            key = _key(completion.request)
            self.stored[key] = {**asdict(completion), "request": key}
        self.source.done(completions)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lock a file, so that only one process at a time checks whether the file exists and writes
    it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, rows: Iterable[Row]) -> None:
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _read(file: Path) -> dict[str, Row]:
    return {} if is_missing(file) else {row["request"]: row for row in read_lines(file)}


def _completion(row: Row, request: Request) -> Completion:
    return Completion(
        request=request,
        tokens=tuple(row["tokens"]),
        logp=tuple(row["logp"]),
        finish=row["finish"],
        versions=tuple(VersionSpan(*span) for span in row["versions"]),
        kept=row["kept"],
    )
