"""A run of a comparison as a job for another process, and how it is known again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey._version import __version__
from covey.compare.design import config_of, plain
from covey.compare.record import OUTCOME_FILE, Record, log_path, read_outcome, run_path
from covey.config import Config, to_toml
from covey.errors import RunError
from covey.reference.fingerprint import fingerprint
from covey.run.folder import RunFolder
from covey.train.assemble import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a worker is told."""

    arm: str
    seed: int
    """Of the comparison; the run's own differs where the arm moves it."""
    folder: str
    shared: str
    config_toml: str
    start: str
    """What decides the starting policy."""
    key: str
    """What decides the run: a finished run with the same key is the same run."""
    threads: int

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.folder)

    def line(self) -> str:
        """Write the job as a line."""
        return json.dumps(asdict(self)) + "\n"


def make_jobs(folder: Path, record: Record) -> list[Job]:
    """Return a job for every arm and seed, seed by seed, so that arms are done side by side."""
    digests: dict[str, str] = {}
    jobs = []
    for seed in record.seeds:
        for arm in record.arms:
            config = config_of(record, arm, seed)
            if config.model.path not in digests:
                digests[config.model.path] = starting_weights(config)
            start = _start(config, digests[config.model.path])
            jobs.append(
                Job(
                    arm=arm.name,
                    seed=seed,
                    folder=str(run_path(folder, arm.name, seed)),
                    shared=str(folder / "shared"),
                    config_toml=to_toml(config),
                    start=start,
                    key=run_key(config, start, record.threads),
                    threads=record.threads,
                )
            )
    return jobs


def starting_weights(config: Config) -> str:
    """Return the digest of the weights that a configuration starts from, without its adapter."""
    model = config.model.model_copy(update={"device": "cpu"})
    adapter = config.adapter.model_copy(update={"rank": 0, "also_train": []})
    return fingerprint(
        load_model(config.model_copy(update={"model": model, "adapter": adapter}))
    ).weights


def _start(config: Config, weights: str) -> str:
    adapter = {**config.adapter.model_dump(), "seed": config.seed} if config.adapter.rank else None
    return _digest([weights, config.model.dtype, config.model.device, adapter])


def run_key(config: Config, start: str, threads: int) -> str:
    """Return what decides a run: configuration, version, starting weights, threads."""
    return _digest([plain(config), __version__, start, threads])


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def ready(job: Job, elsewhere: Mapping[str, Path]) -> bool:
    """Make a run's folder ready to start or go on; return False if nothing is left to do.

    `elsewhere` are finished runs by their key: one with this key is copied rather than done again.
    A run of another key, made by another version of covey say, is put aside and never removed.
    """
    path = job.path
    if path.exists() and not (path / "config.toml").is_file() and not read_outcome(path):
        shutil.rmtree(path)  # killed before it had begun
    if path.exists() and _key_of(path) != job.key:
        _put_aside(path)
    ended = read_outcome(path)
    if ended is not None and ended.state == "done":
        return False
    if not path.exists() and job.key in elsewhere:
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(elsewhere[job.key], partial)
        partial.rename(path)
        return False
    (path / OUTCOME_FILE).unlink(missing_ok=True)  # what failed is tried again
    path.parent.mkdir(parents=True, exist_ok=True)
    return True


def _key_of(path: Path) -> str | None:
    ended = read_outcome(path)
    if ended is not None:
        return ended.key
    key: str | None = RunFolder(path).environment().get("key")
    return key


def _put_aside(path: Path) -> None:
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.aside-{number}")
        if not aside.exists():
            path.rename(aside)
            log_path(path).unlink(missing_ok=True)
            return
    raise RunError(f"{path}: too many runs were put aside; remove some")


def finished_runs(parent: Path) -> dict[str, Path]:
    """Return the finished runs of all comparisons in a folder, by key."""
    found = {}
    for file in sorted(parent.glob(f"*/runs/*/seed-*/{OUTCOME_FILE}")):
        ended = read_outcome(file.parent)
        if ended is not None and ended.state == "done":
            found[ended.key] = file.parent
    return found
