"""The API of the web page, with one function for each URL.

For safety, the server escapes control characters in all data, and the page never inserts data as
HTML.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, CoveyError, RunError
from covey.lab.ui.find_runs import (
    Place,
    evaluations_cached,
    find,
    overview,
    problems,
    settings_cached,
)
from covey.lab.ui.processes import Explorer, Jobs, covey_json
from covey.lab.ui.step_table import SAMPLED, StepTables, curve
from covey.records.folder import RunFolder, edited_settings, flat_settings
from covey.records.metric_registry import METRICS
from covey.records.records import unsaid

READ_SECONDS = 0.04
"""The number of seconds that a request may spend on reading a file. The page repeats a request
until the whole file is read."""
LEAST_SAMPLED = 40
"""The minimum number of steps to sample from each run if a chart shows many runs."""
TABLE_BYTES = 100 * 2**20
SEARCHED_SECONDS = 2.0
FIND_SECONDS = 1.0
"""Minimum number of seconds between two searches for new runs."""
HEALTH_SECONDS = 15
"""The number of seconds between two health checks of a run that is still training."""
LONGEST = 20_000
"""The maximum number of characters of a text, except on the page of a single rollout."""
EVALUATION = (
    "step", "prompts", "greedy", "reward", "mean_tokens", "best_constant", "distinct_answers",
)  # fmt: skip
"""Fields of an evaluation that the page shows."""
Query = Mapping[str, str]


class NotFound(CoveyError):
    """Raised if the requested run or comparison does not exist."""


@dataclass(slots=True)
class Site:
    """The runs that the web page shows, and the caches that are kept between requests."""

    roots: Sequence[Path]
    tables: StepTables = field(default_factory=lambda: StepTables(TABLE_BYTES))
    jobs: Jobs = field(default_factory=Jobs)
    explorer: Explorer = field(default_factory=Explorer)
    _found: tuple[float, dict[str, Place]] = (0.0, {})

    def places(self) -> dict[str, Place]:
        """Return runs and comparisons by id; search the folders at most once per second."""
        when, found = self._found
        if time.monotonic() - when > FIND_SECONDS:
            found = find(self.roots)
            self._found = (time.monotonic(), found)
        return found

    def place(self, query: Query, kind: str = "run", key: str = "run") -> Place:
        """Return the run or comparison with the id in a request.

        For safety, the id in a request is never used as a path.
        """
        place = self.places().get(query.get(key, ""))
        if place is None or place.kind != kind:
            raise NotFound(f"there is no {kind} {query.get(key, '')!r}")
        return place

    def close(self) -> None:
        self.jobs.close()
        self.explorer.close()


def list_all(site: Site, query: Query) -> dict[str, Any]:
    """Return all runs, newest first, and all comparisons."""
    places = site.places().values()
    runs = [overview(place) for place in places if place.kind == "run"]
    runs.sort(key=lambda row: (row["age"] is None, row["age"] or 0.0))
    return {
        "roots": [str(root) for root in site.roots],
        "runs": runs,
        "comparisons": [
            {
                "id": place.id,
                "runs": sum(e.kind == "run" and place.path in e.path.parents for e in places),
            }
            for place in places
            if place.kind == "comparison"
        ],
    }


def metrics(site: Site, query: Query) -> dict[str, Any]:
    return {
        name: {"definition": m.definition, "unit": m.unit, "healthy": m.healthy}
        for name, m in METRICS.items()
    }


def series(site: Site, query: Query) -> dict[str, Any]:
    """Return the curves of all runs that a request names; NUL characters separate the run ids.

    One time limit applies to reading the files of all runs in a request. The page repeats the
    request until all files are read.
    """
    ids = query.get("run", "").split("\0")
    until = time.monotonic() + READ_SECONDS
    samples = max(LEAST_SAMPLED, SAMPLED // len(ids))
    return {"runs": [_curves(site.place({"run": i}), site, query, until, samples) for i in ids]}


def _curves(place: Place, site: Site, query: Query, until: float, samples: int) -> dict[str, Any]:
    """Return a run's curves for the requested metrics, and the names of all its metrics."""
    table = site.tables[place.path]
    axis = query.get("axis", "step")
    asked = [name for name in query.get("metrics", "").split(",") if name]
    pieces = table.update({axis, *asked}, until - time.monotonic(), samples)
    known = {name for piece in pieces for name in piece}
    names = [name for name in asked if name in known and axis in known]
    between = (_number(query, "from", -1.0), _number(query, "to", float("inf")))
    points = int(min(4000, max(2, _number(query, "points", 600))))
    evaluations, notes = evaluations_cached(RunFolder(place.path))
    return {
        "run": place.id,
        "names": sorted(table.names),
        "curves": {name: curve(pieces, name, points, axis=axis, between=between) for name in names},
        "evaluations": [{n: row[n] for n in EVALUATION if n in row} for row in evaluations],
        "rows": sum(len(piece["step"]) for piece in pieces),
        "partial": not table.done,
        "notes": [*problems(place), *table.notes, *notes],
    }


def details(site: Site, query: Query) -> dict[str, Any]:
    place = site.place(query)
    run, notes = RunFolder(place.path), problems(place)
    environment = run.environment(unsaid)
    edited = edited_settings(run, environment)
    known = ("started", "command", "device", "seed", "platform", "packages", "git", "reward")
    return {
        "run": place.id,
        "path": str(place.path),
        "settings": {name: repr(value) for name, value in flat_settings(settings_cached(run))},
        "environment": {name: environment[name] for name in known if name in environment},
        "steps": [number for number, _ in run.numbered("rollouts", ".jsonl")],
        "checkpoints": [number for number, _ in run.checkpoints()],
        "notes": [*notes, *([edited] if edited else [])],
    }


def health(site: Site, query: Query) -> dict[str, Any]:
    """Return the findings of `covey runs check`, which runs in another process."""
    place = site.place(query)
    steps = place.path / "steps.jsonl"
    try:
        changed = int(steps.stat().st_mtime) // HEALTH_SECONDS
    except OSError:
        return {"state": "failed", "error": "there is no steps.jsonl"}
    key = ("health", place.id, str(changed))
    site.jobs.start(key, partial(covey_json, "runs", "check", str(place.path)))
    return site.jobs.status(key)


def explore(site: Site, query: Query) -> dict[str, Any]:
    return site.explorer.ask(dict(query))


def _number(query: Query, name: str, default: float) -> float:
    try:
        return float(query.get(name) or default)
    except ValueError:
        raise ConfigError(f"{name} = {query[name]!r} is not a number") from None


def rollouts_file(site: Site, query: Query) -> Path:
    place, step = site.place(query), int(_number(query, "step", 0))
    kept = dict(RunFolder(place.path).numbered("rollouts", ".jsonl"))
    if step not in kept:
        raise RunError(f"the run has no rollouts of step {step}")
    return kept[step]


def report(site: Site, query: Query) -> str:
    """Return the report of a comparison as HTML, from the current state of its runs."""
    place = site.place(query, "comparison", "comparison")
    from covey.lab.compare.comparison import load_comparison
    from covey.lab.compare.report import page, report_contents

    return page(report_contents(place.path, load_comparison(place.path)))
