"""`covey runs`: list runs, or look into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from covey.errors import RunError
from covey.run.folder import RunFolder, list_runs


def runs_command(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of runs, or one run.")
    ] = Path("runs"),
    step: Annotated[
        int | None, typer.Option(min=1, help="Show the answers of this step of one run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a folder, or show one run's evaluations or the answers of one step."""
    console = Console(soft_wrap=step is not None)
    if not (path / "config.toml").is_file():
        _list(list_runs(path), path, console, as_json)
        return
    run = RunFolder(path)
    if step is None:
        _evaluations(run, console, as_json)
    else:
        _answers(run, step, console, as_json)


def _overview(run: RunFolder) -> dict[str, Any]:
    steps, evaluations = run.steps(), run.evaluations()
    return {
        "run": str(run.path),
        "steps": len(steps),
        "reward": steps[-1].get("objective/scores") if steps else None,
        "greedy_before": evaluations[0]["greedy"]["value"] if evaluations else None,
        "greedy_now": evaluations[-1]["greedy"]["value"] if evaluations else None,
        "checkpoint": run.checkpoints()[-1][0] if run.checkpoints() else None,
    }


def _list(runs: list[RunFolder], path: Path, console: Console, as_json: bool) -> None:
    rows = [_overview(run) for run in runs]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        raise RunError(f"there are no runs in {path}; `covey train` makes one")
    table = Table(
        Column("run", overflow="fold"),
        "steps",
        "reward",
        "greedy before",
        "greedy now",
        "checkpoint",
    )
    for row in rows:
        table.add_row(
            row["run"],
            str(row["steps"]),
            _number(row["reward"], ".3f"),
            _number(row["greedy_before"], ".1%"),
            _number(row["greedy_now"], ".1%"),
            _number(row["checkpoint"], "d"),
        )
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _evaluations(run: RunFolder, console: Console, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**_overview(run), "evaluations": run.evaluations()}))
        return
    table = Table("step", "greedy", "95 % interval", "tokens", title=str(run.path))
    for row in run.evaluations():
        greedy = row["greedy"]
        table.add_row(
            str(row["step"]),
            f"{greedy['value']:.1%}",
            f"[{greedy['low']:.1%}, {greedy['high']:.1%}]",
            f"{row['mean_tokens']:.1f}",
        )
    console.print(table)


def _answers(run: RunFolder, step: int, console: Console, as_json: bool) -> None:
    rows = run.rollouts(step)
    if not rows:
        raise RunError(f"{run.path} has no answers of step {step}")
    if as_json:
        typer.echo(json.dumps(rows))
        return
    asked = None
    for row in rows:
        if row["prompt_id"] != asked:
            asked = row["prompt_id"]
            console.print(
                f"\n{row['prompt']}   (answer: {row['answer']})", style="bold", markup=False
            )
        reward = "unscored" if row["reward"] is None else f"reward {row['reward']:.2f}"
        advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.2f}"
        style = "green" if row["success"] else "default"
        console.print(f"  {reward}{advantage}  {row['text']}", style=style, markup=False)
