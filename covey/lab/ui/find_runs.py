"""Finds runs and comparisons in the user's folders, and summarizes each run in one row.

If a folder has only some files of a run, the folder is also listed, with the names of the missing
files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from covey.errors import RunError
from covey.records.folder import RunFolder, limit_of, settings_of
from covey.records.metric_registry import current_name
from covey.records.records import ENVIRONMENT, last_row, read_object
from covey.records.watch import measured

DEPTH = 4
"""The maximum number of folder levels to search. The run folder comparisons/NAME/runs/ARM/seed-0 is
four levels below the folder comparisons."""
MOST = 2000
"""The maximum number of runs and comparisons in the list. To see runs beyond this maximum, start
`covey ui` with a subfolder."""
SIGNS = ("config.toml", "steps.jsonl", "environment.json")
"""Files that identify a run folder. A folder that contains at least one of these files is listed as
a run."""
COMPARISON = "comparison.toml"


@dataclass(frozen=True, slots=True)
class Place:
    """A run or a comparison that the search found."""

    id: str
    """The id in the page's URLs: the path relative to the folder that the user gave."""
    path: Path
    kind: str
    """`run` or `comparison`."""


def find(roots: Sequence[Path]) -> dict[str, Place]:
    """Map ids to the runs and comparisons in the given folders and their subfolders."""
    found: dict[str, Place] = {}
    for root in roots:
        base = root.parent if kind_of(root) else root
        for path, kind in _walk(root, DEPTH):
            name = os.path.relpath(path, base)
            while name in found:  # another root has a run of the same name
                name += "'"
            found[name] = Place(name, path, kind)
            if len(found) >= MOST:
                return found
    return found


def kind_of(path: Path) -> str | None:
    if (path / COMPARISON).is_file():
        return "comparison"
    return "run" if any((path / name).exists() for name in SIGNS) else None


def _walk(path: Path, depth: int) -> Iterator[tuple[Path, str]]:
    kind = kind_of(path)
    if kind is not None:
        yield path, kind
    if depth == 0 or kind == "run":
        return
    try:
        # Symlinks may lead out of the folder or form cycles.
        below = sorted(
            entry.path
            for entry in os.scandir(path)
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        )
    except OSError:
        return
    for each in below:
        yield from _walk(Path(each), depth - 1)


def overview(place: Place) -> dict[str, Any]:
    """Return a run's row in the list of runs, without reading all steps of the run."""
    run, steps = RunFolder(place.path), place.path / "steps.jsonl"
    stamp, written = _stamp(steps), _stat(steps)
    last = _last(steps, stamp)
    settings = settings_cached(run)
    metric, limit = limit_of(settings)
    evaluations = evaluations_cached(run)[0]
    return {
        "id": place.id,
        "comparison": _comparison_of(place),
        "algorithm": _text(settings.get("objective", {}).get("name")),
        "task": _text(settings.get("task", {}).get("name")),
        "model": _text(settings.get("model", {}).get("path")),
        "step": last["step"],
        "steps": limit if metric == "step" and limit else None,
        "reward": last["sft/loss"]
        if last["objective/scores"] is None
        else last["objective/scores"],
        "greedy_before": measured(evaluations[0], "greedy") if evaluations else None,
        "greedy_now": measured(evaluations[-1], "greedy") if evaluations else None,
        "age": None if written is None else max(0.0, time.time() - written.st_mtime),
        "changed": stamp,
        "missing": [name for name in SIGNS if not (place.path / name).is_file()],
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _comparison_of(place: Place) -> str | None:
    parts = place.path.parts
    inside = len(parts) > 4 and parts[-3] == "runs" and parts[-1].startswith("seed-")
    return f"{parts[-4]}/{parts[-2]}" if inside else None


@lru_cache(maxsize=MOST)
def _last(path: Path, stamp: str) -> dict[str, Any]:
    """Return the metrics that the list of runs shows, from the last line of steps.jsonl.

    The metrics are cached by `stamp`, so that an unchanged file is not read again.
    """
    last = {current_name(name): value for name, value in last_row(path).items()}
    return {name: last.get(name) for name in ("step", "objective/scores", "sft/loss")}


def _stamp(path: Path) -> str:
    """Return inode, size and modification time as a string that changes when the file changes."""
    found = _stat(path)
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}" if found else ""


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def settings_cached(run: RunFolder) -> dict[str, Any]:
    """Return the configuration of a run; read config.toml again only if it has changed."""
    return _settings(str(run.path), _stamp(run.config_file))


@lru_cache(maxsize=512)
def _settings(path: str, stamp: str) -> dict[str, Any]:
    return settings_of(RunFolder(Path(path)))


def evaluations_cached(run: RunFolder) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the evaluations of a run, and notes on evaluations that cannot be read."""
    return _evaluations(str(run.path), _stamp(run.path / "eval.jsonl"))


@lru_cache(maxsize=512)
def _evaluations(path: str, stamp: str) -> tuple[list[dict[str, Any]], list[str]]:
    notes: list[str] = []
    return RunFolder(Path(path)).evaluations(notes.append), notes


def problems(place: Place) -> list[str]:
    found = []
    run = RunFolder(place.path)
    if not run.config_file.is_file():
        found.append("config.toml is missing, so settings are unknown")
    elif not settings_cached(run):
        found.append("config.toml cannot be read as TOML, so settings are unknown")
    try:
        read_object(place.path / "environment.json", ENVIRONMENT)
    except RunError as error:
        found.append(str(error))
    if not (place.path / "steps.jsonl").is_file():
        found.append("steps.jsonl is missing, so there are no curves")
    return found
