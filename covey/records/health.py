"""Runs the health checks on the metrics of a run, and suggests settings to change.

    for finding in Health(settings).add(row): ...     while training
    timeline(run.steps(), settings)                   afterwards

The health checks are defined in health_checks.py. This module does not import torch, because `covey
runs check` and the web page read runs on machines without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from covey.errors import ConfigError, nearest
from covey.records.health_checks import CHECKS, Check, History, Settings, Times

REPEAT = 50
"""Number of training steps after which Covey repeats the message about a persistent problem."""
SILENCE, SILENT_SECONDS = 10, 60.0
"""A run counts as stalled if the time since its last step is at least 60 seconds, and at least 10
times the median time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a health check found in a run's metrics: a problem, or only information."""

    name: str
    since: int
    """The first step that shows the problem."""
    what: str
    why: str
    change: tuple[str, ...]
    """Suggested configuration lines; any one of these lines may solve the problem."""
    also: str
    """Advice that is not a change of settings, such as to use easier prompts; may be empty."""
    problem: bool
    """True if the finding is a problem; False if it is only information."""
    until: int | None = None
    """The last step that shows the problem; None if the newest step still shows it."""

    def line(self) -> str:
        remedy = "; ".join([*([" or ".join(self.change)] if self.change else []), self.also])
        remedy = remedy.strip("; ")
        end = f" to {self.until}" if self.until is not None else ""
        lead = f"{self.name} since step {self.since}{end}: {self.what}; {self.why}"
        return f"{lead}; try {remedy}" if remedy else lead

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "change": list(self.change)}


@dataclass(slots=True)
class Health:
    """Runs all health checks after each step of a run."""

    settings: Settings = field(default_factory=dict)
    history: History = field(default_factory=History)
    active: dict[str, Finding] = field(default_factory=dict)
    """Maps the name of a health check to its finding at the last training step."""
    logged: dict[str, int] = field(default_factory=dict)
    """Maps the name of a health check to the last step at which Covey logged the check's
    finding."""

    def add(self, row: Mapping[str, Any]) -> list[Finding]:
        """Run the checks on the metrics of a new step; return the findings to log now."""
        self.history.add(row)
        before, self.active = self.active, {}
        for name, check in CHECKS.items():
            what = check.find(self.history)
            if what is not None:
                known = before.get(name)
                self.active[name] = (
                    self._finding(name, check, what) if known is None else replace(known, what=what)
                )
        step = row["step"]
        due = [
            finding
            for name, finding in self.active.items()
            if name not in self.logged or step >= self.logged[name] + REPEAT
        ]
        self.logged |= {finding.name: step for finding in due}
        return due

    def _finding(self, name: str, check: Check, what: str) -> Finding:
        rows = self.history.rows
        # Earlier findings are closer to the cause, so their advice on a setting prevails.
        advised = {_key(line): line for each in self.active.values() for line in each.change}
        change = _changes(check, self.settings)
        return Finding(
            name=name,
            since=rows[max(0, len(rows) - check.steps)]["step"],
            what=what,
            why=check.why,
            change=tuple(line for line in change if advised.get(_key(line), line) == line),
            also=check.also,
            problem=check.problem,
        )


def _changes(check: Check, settings: Settings) -> Iterator[str]:
    """Yield the configuration lines that a health check suggests, such as `objective.beta = 0.01`.

    The lines omit settings that already have the suggested value or that the algorithm does not
    use.
    """
    for key, wanted in check.change:
        section, _, name = key.partition(".")
        now = settings.get(section, {}).get(name)
        if not isinstance(wanted, Times):
            value = wanted
        elif not isinstance(now, int | float):
            continue
        else:
            value = type(now)(now * wanted.factor) if now else wanted.instead_of_zero
        if value != now:
            was = "" if now is None else f" (now {_toml(now)})"
            yield f"{key} = {_toml(value)}{was}"


def _key(line: str) -> str:
    return line.partition(" = ")[0]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def timeline(rows: Iterable[Mapping[str, Any]], settings: Settings) -> list[Finding]:
    """Run the health checks on all steps of a run; return the findings, earliest first.

    Findings of the same step are sorted as in `CHECKS`, which lists causes before effects.
    """
    health, before = Health(settings), 0
    found: list[tuple[int, Finding]] = []
    active: dict[str, tuple[int, Finding]] = {}
    for row in rows:
        health.add(row)
        ended = [active[name] for name in active if name not in health.active]
        found += [(step, replace(finding, until=before)) for step, finding in ended]
        active = {
            name: (active[name][0] if name in active else row["step"], finding)
            for name, finding in health.active.items()
        }
        before = row["step"]
    order = list(CHECKS)
    every = sorted(
        [*found, *active.values()], key=lambda each: (each[0], order.index(each[1].name))
    )
    return [finding for _, finding in every]


def silence(rows: Sequence[Mapping[str, Any]], seconds: float) -> Finding | None:
    """Return a finding if a run has stalled. `seconds` is the time since the run's last step."""
    times = [row["time/total"] for row in rows[-10:] if row.get("time/total")]
    if not times or seconds < max(SILENT_SECONDS, SILENCE * median(times)):
        return None
    check = CHECKS["stalled"]
    what = f"no step for {seconds:.0f} s; a step took {median(times):.0f} s"
    step = rows[-1]["step"]
    return Finding(
        name="stalled", since=step, what=what, why=check.why, change=(), also=check.also,
        problem=True,
    )  # fmt: skip


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in CHECKS:
            hint = nearest(name, CHECKS)
            raise ConfigError(f"config: train.stop_on: {name!r} is not a known health check{hint}")
