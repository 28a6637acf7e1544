"""Reads and writes the files in the folder of a comparison.

    comparison.toml                      common settings, arms with their differences, seeds, budget
    environment.json                     where the comparison was started
    runs/ARM/seed-S/                     a run folder like any other ...
    runs/ARM/seed-S/outcome.json         ... with how the run ended
    runs/ARM/seed-S.log                  what the run printed
    report.html, report.md, report.json

This module does not import torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from covey.config import parse_config, to_toml, toml_lines, toml_value
from covey.config.other_names import check_names, new_setting, translated
from covey.errors import RunError
from covey.lab.compare.comparison import (
    Arm,
    BudgetKind,
    Comparison,
    Point,
    RunOutcome,
    RunResult,
    compared_by,
    with_metric,
)
from covey.notices import notice
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.records.records import Shape, is_missing, read_object, read_text

DESIGN_FILE, OUTCOME_FILE = "comparison.toml", "outcome.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The settings, arms, seeds and budget of a comparison, as comparison.toml stores them."""

    command: str
    given: Mapping[str, Any]
    """The common settings as the user gave them, from which the arms are built."""
    common: Mapping[str, Any]
    """The common settings with all defaults filled in."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    threads: int
    """The number of threads of each run. The number of threads never changes within a comparison,
    because it affects the rounding of sums on a CPU.
    """
    findings: tuple[Mapping[str, str], ...] = ()


OUTCOME: Shape = TypeAdapter(RunOutcome)


def run_path(folder: Path, arm: str, seed: int) -> Path:
    """Return the run folder for an arm and a seed."""
    return folder / "runs" / arm / f"seed-{seed}"


def log_path(run: Path) -> Path:
    """Return the log file with the output of a run's process."""
    return run.with_name(f"{run.name}.log")


def write_outcome(run: Path, outcome: RunOutcome) -> None:
    """Write outcome.json."""
    write_text(run / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcome(run: Path) -> RunOutcome | None:
    """Return the outcome of a run, or None if the run has not ended."""
    file = run / OUTCOME_FILE
    if is_missing(file):
        return None
    try:
        row = read_object(file, OUTCOME)
    except RunError as error:
        notice(f"{error}; the run counts as unfinished")
        return None
    outcome: RunOutcome = OUTCOME.validate_python(row)
    return outcome


def write_design(folder: Path, design: Design) -> None:
    """Write comparison.toml."""
    lines = [
        f"command = {toml_value(design.command)}",
        f"seeds = {toml_value(design.seeds)}",
        f"budget = {toml_value(design.budget)}",
        f"amount = {design.amount}",
        f"threads = {design.threads}",
    ]
    for arm in design.arms:
        present = {key: value for key, value in arm.differences.items() if value is not None}
        lines += [
            "\n[[arms]]",
            f"name = {toml_value(arm.name)}",
            f"settings = {toml_value(arm.settings)}",
            f"seed_offset = {arm.seed_offset}",
            f"differences = {toml_value(present)}",
            f"without = {toml_value([k for k in arm.differences if k not in present])}",
        ]
    for finding in design.findings:
        lines += ["\n[[findings]]", *(f"{k} = {toml_value(str(v))}" for k, v in finding.items())]
    for name, settings in (("given", design.given), ("common", design.common)):
        top = {k: v for k, v in settings.items() if not isinstance(v, Mapping)}
        lines += [f"\n[{name}]", *toml_lines(top)]
        for section, values in settings.items():
            if isinstance(values, Mapping):
                lines += [f"\n[{name}.{section}]", *toml_lines(values)]
    write_text(folder / DESIGN_FILE, "\n".join(lines) + "\n")


def read_design(folder: Path) -> Design:
    """Read comparison.toml, and rename settings of Covey 0.1 to their current names."""
    file = folder / DESIGN_FILE
    if not file.is_file():
        raise RunError(
            f"{folder} is not a comparison folder, because it has no file {DESIGN_FILE}; give "
            "another folder"
        )
    try:
        data = tomllib.loads(read_text(file))
        old = check_names(data["common"]) is not None
        if old:
            data |= {name: translated(data[name]) for name in ("given", "common")}
        arms = tuple(_read_arm(_renamed(arm) if old else arm) for arm in data.pop("arms"))
        seeds, findings = tuple(data.pop("seeds")), tuple(data.pop("findings", []))
        return Design(**data, arms=arms, seeds=seeds, findings=findings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} cannot be read: {error!r}; repair the file, or start a comparison in another "
            "folder"
        ) from None


def _read_arm(row: Mapping[str, Any]) -> Arm:
    return Arm(
        name=row["name"],
        settings=tuple(row["settings"]),
        seed_offset=row["seed_offset"],
        differences={**row["differences"], **dict.fromkeys(row["without"])},
    )


def _renamed(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm of Covey 0.1, with its settings renamed to their current names."""

    def new(key: str) -> str:
        return new_setting(key) or key

    settings = [setting.partition("=") for setting in arm["settings"]]
    return {
        **arm,
        "settings": [f"{new(key.strip())}{equals}{value}" for key, equals, value in settings],
        "differences": {new(key): value for key, value in arm["differences"].items()},
        "without": [new(key) for key in arm["without"]],
    }


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison's design, runs and evaluations from its folder."""
    design = read_design(folder)
    environment = folder / "environment.json"
    shared = ("command", "arms", "seeds", "budget", "amount", "findings")
    runs = [_load_run(folder, arm.name, seed) for arm in design.arms for seed in design.seeds]
    by = compared_by(runs)
    return Comparison(
        **{name: getattr(design, name) for name in shared},
        name=folder.resolve().name,
        runs=tuple(with_metric(run, by) for run in runs),
        best_constant=_best_constant(folder, runs),
        environment=RunFolder(folder).environment() if environment.exists() else {},
        config_toml=to_toml(parse_config(design.common)),
    )


def _best_constant(folder: Path, runs: Sequence[RunResult]) -> float | None:
    """Return the recorded best accuracy of a policy that gives every prompt the same answer."""
    for run in runs:
        for row in RunFolder(folder / run.folder).evaluations(note=lambda text: None):
            value = row.get("best_constant")
            return None if value is None else float(value)
    return None


def _load_run(folder: Path, arm: str, seed: int) -> RunResult:
    """Read the outcome and evaluations of one run.

    A run that has not started has no evaluations.
    """
    path = run_path(folder, arm, seed)
    ended = read_outcome(path) or RunOutcome(key="", state="unfinished")
    run, where = RunFolder(path), str(path.relative_to(folder))
    points = _points(run)
    # Each run starts with an evaluation, and writes the rows of an evaluation before its summary.
    known = {0, *(step for step, _ in run.numbered("evaluations", ".jsonl"))}
    known |= {row["step"] for row in run.evaluations(lambda text: None)}
    lost = sorted(known - {point.step for point in points}) if ended.state == "done" else ()
    return RunResult(
        arm=arm, seed=seed, points=points, unreadable=tuple(lost), folder=where, **asdict(ended)
    )


def _points(run: RunFolder) -> tuple[Point, ...]:
    """Return the evaluations that cover all prompts; incomplete evaluations cannot be compared."""
    steps = run.steps()
    points = []
    for row in run.evaluations():
        items = run.items(row["step"])
        read = len({item["prompt_id"] for item in items})
        if row["step"] > 0 and not steps:
            why = "steps.jsonl is missing or damaged"
        elif read != row["prompts"]:
            why = f"only {read} of its {row['prompts']} prompts can be read"
        else:
            points.append(_point(row, steps, items))
            continue
        notice(f"{run.path}: the evaluation of step {row['step']} is left out, because {why}")
    return tuple(points)


def _point(
    evaluation: Mapping[str, Any], steps: list[dict[str, Any]], items: list[dict[str, Any]]
) -> Point:
    step = evaluation["step"]
    done = [row for row in steps if row["step"] <= step]
    newest = done[-1] if done else {}
    return Point(
        step=step,
        tokens=newest.get("tokens") or 0,
        updates=newest.get("updates") or 0,
        seconds=sum(row.get("time/total") or 0.0 for row in done if row["step"] > 1),
        # A completion that could not be scored counts as incorrect.
        correct={row["prompt_id"]: bool(row["success"]) for row in items},
        rewards={
            row["prompt_id"]: {
                "reward": row["reward"],
                **{f"parts/{name}": value for name, value in row.get("parts", {}).items()},
            }
            for row in items
            if row.get("reward") is not None
        },
        distinct_answers=evaluation.get("distinct_answers"),
    )
