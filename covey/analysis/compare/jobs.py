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
from covey.analysis.compare.design import config_of, plain
from covey.analysis.compare.digest import task_digest
from covey.analysis.compare.record import OUTCOME_FILE, Record, log_path, read_outcome, run_path
from covey.config import Config, parse_config, to_toml
from covey.errors import RunError
from covey.reference.fingerprint import fingerprint
from covey.rewards.identity import identity
from covey.run.folder import RunFolder
from covey.training.build import load_model, reward_of, task_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a worker is told."""

    arm: str
    seed: int
    """Of the comparison; the run's own differs where the arm moves it."""
    folder: str
    shared: str
    config_toml: str
    common_toml: str
    """The common configuration, whose reward judges the evaluations of all arms."""
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
    weights: dict[str, str] = {}
    data: dict[str, str] = {}
    common = parse_config(record.common)
    jobs = []
    for seed in record.seeds:
        for arm in record.arms:
            config = config_of(record, arm, seed)
            model, task = config.model.path, config.task.model_dump_json()
            if model not in weights:
                weights[model] = starting_weights(config)
            if task not in data:
                data[task] = task_digest(task_of(config))
            start = _start(config, weights[model])
            key = run_key(config, common, start=start, data=data[task], threads=record.threads)
            jobs.append(
                Job(
                    arm=arm.name,
                    seed=seed,
                    folder=str(run_path(folder, arm.name, seed)),
                    shared=str(folder / "shared"),
                    config_toml=to_toml(config),
                    common_toml=to_toml(common),
                    start=start,
                    key=key,
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


def run_key(config: Config, common: Config, *, start: str, data: str, threads: int) -> str:
    """Return what decides a run: configuration, version, starting weights, data, rewards, threads.

    Files may have been edited since, so data and rewards are known by what they hold.
    """
    judging = [
        [identity(c.reward.name, reward_of(c)), c.scoring.model_dump()] for c in (config, common)
    ]
    return _digest([plain(config), __version__, start, data, judging, threads])


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, default=repr)  # TOML has dates, JSON has not
    return hashlib.sha256(text.encode()).hexdigest()


def ready(job: Job, elsewhere: Mapping[str, Path]) -> bool:
    """Make a run's folder ready to start or go on; return False if nothing is left to do.

    `elsewhere` are finished runs by their key: one with this key is copied rather than done again.
    A run of another key, made from other data or by another version of covey say, is put aside
    and never removed.
    """
    path = job.path
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
    key: str | None = RunFolder(path).environment(lambda text: None).get("key")
    return key


def _put_aside(path: Path) -> None:
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.aside-{number}")
        if not aside.exists():
            path.rename(aside)
            if log_path(path).exists():
                log_path(path).rename(log_path(aside))
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
