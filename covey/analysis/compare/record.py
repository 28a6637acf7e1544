"""What a comparison is, on disk: comparison.toml, and the outcome of each of its runs.

    comparison.toml                    common settings, arms with their differences, seeds, budget
    environment.json                   where it was started
    shared/*.jsonl                     answers before the first update, sampled once for all arms
    runs/ARM/seed-S/                   run folders like any other ...
    runs/ARM/seed-S/outcome.json       ... with what became of them
    runs/ARM/seed-S/first_answers.json   names of the shared answers that it learned from first
    runs/ARM/seed-S.log                what a run said
    report.html, report.md, report.json

No torch here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from covey.analysis.compare.outcome import Arm, BudgetKind, State
from covey.config import toml_lines, toml_value
from covey.errors import RunError
from covey.run.files import write_text
from covey.run.records import Shape, is_missing, read_object, to_stderr

RECORD_FILE, OUTCOME_FILE = "comparison.toml", "outcome.json"
FIRST_ANSWERS = "first_answers.json"
"""Names of the shared answers that a run's first step learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """An arm as it was asked for, and what that makes different."""

    name: str
    settings: tuple[str, ...] = ()
    """Overrides of the common settings, such as optimizer.learning_rate=0."""
    seed_offset: int = 0
    """Added to every seed: other prompts and other answers, but nothing else."""
    differences: Mapping[str, Any]
    """Dotted setting -> value, in full; None where the arm has no such setting."""

    @property
    def arm(self) -> Arm:
        """What a report shows."""
        return Arm(name=self.name, differences=self.differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A comparison as it was asked for."""

    command: str
    given: Mapping[str, Any]
    """The common settings as they were given, from which arms are made."""
    common: Mapping[str, Any]
    """The same with every default written out, to be read."""
    arms: tuple[ArmRecord, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    threads: int
    """Of each run. On a CPU the last bits depend on it, so it stays what it was."""
    findings: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What became of a run that ended by itself."""

    key: str
    state: State
    error: str = ""
    weights: str = ""
    first_answers: str = ""


OUTCOME: Shape = TypeAdapter(RunOutcome)


def run_path(folder: Path, arm: str, seed: int) -> Path:
    """Return the run folder of an arm and a seed."""
    return folder / "runs" / arm / f"seed-{seed}"


def log_path(run: Path) -> Path:
    """Return the file that holds what a run said."""
    return run.with_name(f"{run.name}.log")


def write_outcome(run: Path, outcome: RunOutcome) -> None:
    """Write down what became of a run. Until then it is unfinished."""
    write_text(run / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcome(run: Path) -> RunOutcome | None:
    """Return what became of a run, or None if it has not ended."""
    file = run / OUTCOME_FILE
    if is_missing(file):
        return None
    try:
        found: RunOutcome = OUTCOME.validate_python(read_object(file, OUTCOME))
        return found
    except RunError as error:
        to_stderr(f"{error}; the run counts as unfinished")
        return None


def write_record(folder: Path, record: Record) -> None:
    """Write comparison.toml."""
    lines = [
        f"command = {toml_value(record.command)}",
        f"seeds = {toml_value(record.seeds)}",
        f"budget = {toml_value(record.budget)}",
        f"amount = {record.amount}",
        f"threads = {record.threads}",
    ]
    for arm in record.arms:
        kept = {key: value for key, value in arm.differences.items() if value is not None}
        lines += [
            "\n[[arms]]",
            f"name = {toml_value(arm.name)}",
            f"settings = {toml_value(arm.settings)}",
            f"seed_offset = {arm.seed_offset}",
            f"differences = {toml_value(kept)}",
            f"without = {toml_value([k for k in arm.differences if k not in kept])}",
        ]
    for finding in record.findings:
        lines += ["\n[[findings]]", *(f"{k} = {toml_value(str(v))}" for k, v in finding.items())]
    for name, settings in (("given", record.given), ("common", record.common)):
        lines += _tables(name, settings)
    write_text(folder / RECORD_FILE, "\n".join(lines) + "\n")


def _tables(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Write settings as tables under a name."""
    alone = {k: v for k, v in settings.items() if not isinstance(v, Mapping)}
    lines = [f"\n[{name}]", *toml_lines(alone)]
    for section, values in settings.items():
        if isinstance(values, Mapping):
            lines.append(f"\n[{name}.{section}]")
            lines += toml_lines(values)
    return lines


def read_record(folder: Path) -> Record:
    """Read comparison.toml."""
    file = folder / RECORD_FILE
    if not file.is_file():
        raise RunError(f"{folder} is not a comparison: it has no {RECORD_FILE}")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        arms = [
            ArmRecord(
                name=arm["name"],
                settings=tuple(arm["settings"]),
                seed_offset=arm["seed_offset"],
                differences={**arm["differences"], **dict.fromkeys(arm["without"])},
            )
            for arm in data.pop("arms")
        ]
        seeds, findings = tuple(data.pop("seeds")), tuple(data.pop("findings", []))
        return Record(**data, arms=tuple(arms), seeds=seeds, findings=findings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} cannot be read: {error!r}") from None
