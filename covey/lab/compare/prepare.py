"""Prepares a comparison: chooses its folder, resumes or extends earlier runs, checks fairness."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from covey.config import Config, parse_config
from covey.errors import ConfigError, RunError
from covey.lab.compare.comparison import DESIGN_FILE, Arm, Design, read_design
from covey.lab.compare.design import (
    Request,
    arm_configs,
    check_prompts,
    design_comparison,
    known_beforehand,
    same_comparison,
    with_arms,
    with_seeds,
)

PARENT = Path("comparisons")
"""The default parent folder of comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A comparison that is ready to run."""

    folder: Path
    design: Design
    previous: Design | None
    """The design of the comparison that the folder already contains, or None."""


def prepare(request: Request, folder: Path | None = None) -> Prepared:
    """Choose the folder of a comparison.

    If the folder already contains a comparison with the same design, resume this comparison.
    Without `folder`, choose the next free folder comparisons/NAME-N.
    """
    design = design_comparison(request)
    if len(design.arms) < 2:
        raise ConfigError(
            "nothing to compare: give at least two arms, such as the algorithms grpo and gspo"
        )
    stem = Path(request.source).stem or "dataset"
    numbered = (PARENT / f"{stem}-{number}" for number in itertools.count(1))
    for path in numbered if folder is None else [folder]:
        if (path / DESIGN_FILE).is_file():
            if same_comparison(read_design(path), design):
                return extend(path, seeds=len(design.seeds), threads=request.threads)
        elif not path.exists() or not any(path.iterdir()):
            return Prepared(folder=path, design=design, previous=None)
        elif folder is not None:
            raise RunError(
                f"{path} already contains files that do not belong to a comparison; choose another "
                "folder"
            )
    raise ConfigError(
        f"{folder} already contains a comparison with different settings, arms or budget; choose "
        f"another folder, or add an arm with covey compare --folder {folder} --add ALGORITHM"
    )


def extend(
    folder: Path,
    algorithms: Iterable[str] = (),
    arms: Iterable[Arm] = (),
    seeds: int | None = None,
    threads: int = 0,
) -> Prepared:
    """Add arms or seeds to the comparison in a folder, without changing its existing runs."""
    old = read_design(folder)
    if threads not in (0, old.threads):
        raise ConfigError(
            f"--threads {threads}: the existing runs in {folder} use {old.threads} threads, and "
            "another number of threads would change the last digits of the results; leave out "
            "--threads, or choose another --folder"
        )
    new = with_arms(old, algorithms, arms)
    new = new if seeds is None else with_seeds(new, seeds)
    if new != old:
        words = ["covey", "compare", "--folder", str(folder)]
        for arm in new.arms[len(old.arms) :]:
            words += ["--arm", arm.text]
        words += ["--seeds", str(len(new.seeds))] if new.seeds != old.seeds else []
        new = replace(new, command=f"{old.command}\n{shlex.join(words)}")
    return Prepared(folder=folder, design=new, previous=old)


def checked(prepared: Prepared) -> Prepared:
    """Raise an error if a comparison is unfair.

    The returned comparison contains the possible problems and the number of threads.
    """
    design, old = prepared.design, prepared.previous
    configs = arm_configs(design)
    check_prompts(configs)  # also for a resumed comparison, because its data may have been edited
    if old is not None and [a.name for a in old.arms] == [a.name for a in design.arms]:
        return prepared
    threads = design.threads or _threads(configs, runs=len(design.arms) * len(design.seeds))
    findings = known_beforehand(design, configs)
    return replace(prepared, design=replace(design, threads=threads, findings=findings))


def parallel_runs(design: Design) -> int:
    """Return how many runs this machine can train at the same time."""
    if _on_gpu([parse_config(design.common)]):
        return 1
    return max(1, (os.cpu_count() or 1) // design.threads)


def _threads(configs: dict[str, Config], runs: int) -> int:
    """Return the number of threads of each run. On a CPU, the runs share the cores equally."""
    import torch

    if _on_gpu(configs.values()):
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // runs)


def _on_gpu(configs: Iterable[Config]) -> bool:
    import torch

    devices = {config.model.device for config in configs}
    found = torch.cuda.is_available()
    return any(d.startswith("cuda") or (d == "auto" and found) for d in devices)
