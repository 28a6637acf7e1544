"""Where a comparison lives: a new folder, the one of the same request before, or one that grows."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from covey.analysis.compare.design import (
    Asked,
    AskedArm,
    arm_configs,
    plan_comparison,
    same_comparison,
    with_arms,
    with_seeds,
)
from covey.analysis.compare.fairness import check_prompts, known_beforehand
from covey.analysis.compare.record import RECORD_FILE, Record, read_record, write_record
from covey.config import Config, parse_config
from covey.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A comparison that is about to be run."""

    folder: Path
    record: Record
    before: Record | None
    """What the folder holds already."""


def place(asked: Asked, parent: Path, folder: Path | None = None) -> Place:
    """Find the folder of a request, or choose one: asked again, a request goes on."""
    record = plan_comparison(asked)
    if len(record.arms) < 2:
        raise ConfigError(
            "nothing to compare: give two arms or more, such as --algorithms grpo,dr_grpo,gspo"
        )
    candidates = _numbered(parent, Path(asked.source).stem) if folder is None else iter([folder])
    for path in candidates:
        if not (path / RECORD_FILE).is_file():
            if path.exists() and any(path.iterdir()):
                if folder is None:
                    continue
                raise RunError(f"{path} already holds files that are not a comparison's")
            return Place(folder=path, record=record, before=None)
        old = read_record(path)
        if same_comparison(old, record):
            return grown(path, seeds=len(record.seeds), threads=asked.threads)
    raise ConfigError(
        f"{folder} holds another comparison: its settings, arms or budget are not these; choose "
        "another --folder, or give --folder with --add, --arm and --seeds alone to add to it"
    )


def _numbered(parent: Path, stem: str) -> Iterator[Path]:
    return (parent / f"{stem}-{number}" for number in itertools.count(1))


def grown(
    folder: Path,
    *,
    algorithms: Iterable[str] = (),
    arms: Iterable[AskedArm] = (),
    seeds: int | None = None,
    threads: int = 0,
) -> Place:
    """Return a comparison with more arms or seeds; what it has already stays."""
    old = read_record(folder)
    if threads not in (0, old.threads):
        raise ConfigError(
            f"--threads {threads}: the runs of {folder} have {old.threads}, on which their last "
            "bits depend; leave it out, or choose another --folder"
        )
    new = with_arms(old, algorithms, arms)
    new = new if seeds is None else with_seeds(new, seeds)
    if new != old:
        new = replace(new, command=f"{old.command}\n{_growing(folder, old, new)}")
    return Place(folder=folder, record=new, before=old)


def _growing(folder: Path, old: Record, new: Record) -> str:
    """Return the command that makes the new out of the old."""
    words = ["covey", "compare", "--folder", str(folder)]
    for arm in new.arms[len(old.arms) :]:
        asked = AskedArm(name=arm.name, settings=arm.settings, seed_offset=arm.seed_offset)
        words += ["--arm", asked.text]
    words += ["--seeds", str(len(new.seeds))] if new.seeds != old.seeds else []
    return shlex.join(words)


def checked(place: Place) -> Place:
    """Refuse what would not be fair, find out what is known beforehand, and settle the threads."""
    record, old = place.record, place.before
    configs = arm_configs(record)
    check_prompts(configs)  # of what goes on too: its data may have been edited
    if old is not None and [a.name for a in old.arms] == [a.name for a in record.arms]:
        return place
    threads = record.threads or _threads(configs, runs=len(record.arms) * len(record.seeds))
    findings = known_beforehand(record, configs)
    return replace(place, record=replace(record, threads=threads, findings=findings))


def on_gpu(configs: Iterable[Config]) -> bool:
    """Whether some run computes on a GPU."""
    import torch

    devices = {config.model.device for config in configs}
    found = torch.cuda.is_available()
    return any(d.startswith("cuda") or (d == "auto" and found) for d in devices)


def _threads(configs: dict[str, Config], runs: int) -> int:
    """Share the cores among the runs: side by side with a thread each wastes the least."""
    import torch

    if on_gpu(configs.values()):
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // runs)


def side_by_side(record: Record) -> int:
    """Return how many runs this machine takes at a time."""
    if on_gpu([parse_config(record.common)]):
        return 1
    return max(1, (os.cpu_count() or 1) // record.threads)


def settle(place: Place) -> None:
    """Write down what is compared, before anything is run."""
    if place.before != place.record:
        write_record(place.folder, place.record)
