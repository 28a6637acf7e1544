"""Stores the completions of the first training step, so that all arms of a comparison share them.

Before the first optimizer step, all runs of a seed have the same weights, prompts and random
numbers. All runs of a seed should therefore sample the same completions in the first step. On a
GPU, however, rounding errors could make the completions of these runs differ. The completions are
generated and stored by the first run that needs them. All later runs read the stored completions.
The name of each file contains a digest of all settings that determine the completions in the file.
A run therefore never reads completions that were generated with different settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
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
from covey.run.files import write_text
from covey.run.records import read_lines
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
        """Read the first step's completions from a file, or generate and store them.

        In later steps, generate the completions as usual.
        """
        if self.version > 0 or not requests.limits.requests:
            self.engine.run(requests)
            return
        ready = requests.take()
        step = ready[0].address.step
        file = self.folder / f"{self._name(ready, requests.limits, step)}.jsonl"
        if step != EVALUATION_STEP and file.stem not in self.names:
            self.names.append(file.stem)
            write_text(self.names_file, json.dumps(self.names) + "\n")
        with _alone(file):
            if not file.exists():
                recorder = _Recorder(requests, ready)
                self.engine.run(recorder)
                _write(file, recorder.completions)
                return
        requests.done(_read(file, ready))

    def _name(self, requests: Sequence[Request], limits: Limits, step: int) -> str:
        settings = asdict(limits.sampling)
        for name in ("max_concurrent", "cache_gigabytes"):  # they do not change completions
            del settings[name]
        greedy, seed = limits.sampling.distribution.temperature == 0.0, limits.sampling.seed
        if greedy:
            settings["seed"] = None  # greedy generation draws no random numbers
        prompts = {request.prompt: (request.address.prompt, request.tokens) for request in requests}
        name = "evaluation" if step == EVALUATION_STEP else f"step-{step}"
        tail = "" if greedy else f"-seed-{seed}"
        decisive = json.dumps([self.start, list(prompts.values()), step, settings], sort_keys=True)
        return f"{name}{tail}-{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class _Recorder:
    """A request source that first returns the requests in `ready`, and records completions."""

    source: RequestSource
    ready: Sequence[Request]
    completions: list[Completion] = field(default_factory=list)

    @property
    def limits(self) -> Limits:
        return self.source.limits

    def take(self) -> Sequence[Request]:
        ready, self.ready = self.ready, ()
        return ready or self.source.take()

    def done(self, completions: Sequence[Completion]) -> None:
        self.completions += completions
        self.source.done(completions)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lock a file, so that only one process at a time can check whether it exists, and write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, completions: Sequence[Completion]) -> None:
    ordered = sorted(completions, key=lambda completion: completion.request.number)
    rows = [{**asdict(completion), "request": completion.request.number} for completion in ordered]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _read(file: Path, requests: Sequence[Request]) -> list[Completion]:
    numbered = {request.number: request for request in requests}
    return [
        Completion(
            request=numbered[row["request"]],
            tokens=tuple(row["tokens"]),
            logp=tuple(row["logp"]),
            finish=row["finish"],
            versions=tuple(VersionSpan(*span) for span in row["versions"]),
            kept=row["kept"],
        )
        for row in read_lines(file)
    ]
