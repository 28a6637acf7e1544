"""Reading a comparison's folder: what its runs left is what a report is made of. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.analysis.compare.outcome import Comparison, Outcome, Point
from covey.analysis.compare.record import read_outcome, read_record, run_path
from covey.config import parse_config, to_toml
from covey.run.folder import RunFolder
from covey.run.records import to_stderr


def load_comparison(folder: Path) -> Comparison:
    """Read everything that a report is made of."""
    record = read_record(folder)
    environment = folder / "environment.json"
    return Comparison(
        name=folder.resolve().name,
        command=record.command,
        arms=tuple(arm.arm for arm in record.arms),
        seeds=record.seeds,
        budget=record.budget,
        amount=record.amount,
        outcomes=tuple(
            load_outcome(folder, arm.name, seed) for arm in record.arms for seed in record.seeds
        ),
        findings=record.findings,
        environment=RunFolder(folder).environment() if environment.exists() else {},
        config_toml=to_toml(parse_config(record.common)),
    )


def load_outcome(folder: Path, arm: str, seed: int) -> Outcome:
    """Read one run, which may not have begun."""
    path = run_path(folder, arm, seed)
    ended = read_outcome(path)
    return Outcome(
        arm=arm,
        seed=seed,
        state="unfinished" if ended is None else ended.state,
        error="" if ended is None else ended.error,
        points=_points(RunFolder(path)),
        folder=str(path.relative_to(folder)),
        weights="" if ended is None else ended.weights,
        first_answers="" if ended is None else ended.first_answers,
    )


def _points(run: RunFolder) -> tuple[Point, ...]:
    """Return the evaluations of which every prompt is known; others cannot be compared."""
    steps = run.steps()
    points = []
    for row in run.evaluations():
        items = run.items(row["step"])
        if len(items) == row["prompts"]:
            points.append(_point(row["step"], steps, items))
        else:
            to_stderr(
                f"{run.path}: the evaluation of step {row['step']} is left out, {len(items)} of "
                f"its {row['prompts']} prompts can be read"
            )
    return tuple(points)


def _point(step: int, steps: list[dict[str, Any]], items: list[dict[str, Any]]) -> Point:
    done = [row for row in steps if row["step"] <= step]
    newest = done[-1] if done else {}
    return Point(
        step=step,
        tokens=newest.get("tokens") or 0,
        updates=newest.get("updates") or 0,
        seconds=sum(row.get("time/total") or 0.0 for row in done if row["step"] > 1),
        # What could not be scored counts as wrong: nothing can stand in for it.
        right={row["prompt_id"]: bool(row["success"]) for row in items},
    )
