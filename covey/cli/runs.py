"""`covey runs`: list runs, show or check one run, and write its report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from covey.cli.startup import AsJson, Trust, tell_edited, waiting
from covey.errors import RunError
from covey.records.folder import FAILURE, RunFolder, limit_of, list_runs, settings_of
from covey.records.health import silence, timeline
from covey.records.health_checks import CERTAIN
from covey.records.metric_registry import estimate_text
from covey.records.records import turn_lines, unsaid
from covey.screen import UNLIMITED, Screen, cell, echo

if TYPE_CHECKING:
    from covey.lab.checks.result import Result


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
STYLES = {True: "green", False: "bold red", None: "dim"}
"""Maps the result of a check (True, False, or None for a skipped check) to a text style."""
FORMS = {
    "started": "s",
    "model": "s",
    "state": "s",
    "steps": "d",
    "reward": ".3f",
    "greedy_before": ".1%",
    "greedy_now": ".1%",
    "checkpoint": "d",
}
"""Maps each column of the table of runs, except the run's name, to its number or text format."""
LEAST_FIRST = (
    "checkpoint", "model", "greedy_before", "started", "reward", "state", "steps", "greedy_now",
)  # fmt: skip
"""Columns to omit from the table on a narrow terminal, least important column first."""
SHOW = "show"


class _Runs(TyperGroup):
    """The commands of `covey runs`; `covey runs FOLDER` means `covey runs show FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `show` before the arguments, unless the arguments start with a command or
        --help."""
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [SHOW, *args])


app = typer.Typer(
    rich_markup_mode=None,
    cls=_Runs,
    help="List runs, or show one run, check its health, verify its checkpoints, or write its "
    "report. `covey runs RUN` is short for `covey runs show RUN`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("check")
def check_command(
    path: Run,
    as_json: AsJson = False,
) -> None:
    """List the problems of a run. For each problem, show where it began, its cause and a remedy.

    The exit code is 1 if the last step shows a problem, and 0 otherwise.
    """
    run = RunFolder.open(path)
    rows = run.steps()
    if not rows:
        raise RunError(f"the run {path} has no training steps yet")
    found = timeline(rows, settings_of(run))
    seconds = time.time() - (run.path / "steps.jsonl").stat().st_mtime
    silent = silence(rows, seconds) if run.in_use() else None
    found += [silent] if silent else []
    last = rows[-1]["step"]
    problem = any(finding.problem and finding.until is None for finding in found)
    if as_json:
        early = len(rows) < CERTAIN
        findings = [f.row() for f in found]
        typer.echo(
            json.dumps({"run": str(path), "step": last, "early": early, "findings": findings})
        )
    else:
        console = Screen(soft_wrap=True)
        for finding in sorted(found, key=lambda each: each.until is not None):
            over = finding.until is not None
            style = "dim" if over else "yellow" if finding.problem else "default"
            console.print(f"{'(over) ' * over}{finding.line()}", style=style)
        if not problem:
            said = f"nothing is wrong at step {last}"
            if len(rows) < CERTAIN:
                said = f"too early to say whether something is wrong, at step {last}"
            console.print(f"{path}: {said}")
    if problem:
        raise typer.Exit(1)


@app.command("report")
def report_command(
    path: Run,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write the report to this folder instead of the run folder."
        ),
    ] = None,
) -> None:
    """Write the report of a run as report.html, which opens offline, and as report.md.

    The report shows curves, evaluations, health checks, settings, and sample completions from
    before, during and after training.
    """
    run = RunFolder.open(path)
    if out is not None and not out.is_dir():
        raise RunError(f"--out {out}: this folder does not exist; create the folder first")

    from covey.lab.report import write_run_report

    for file in write_run_report(run, out or path):
        echo(str(file))


@app.command("verify")
def verify_command(
    path: Run,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Also repeat the last saved training step, and compare the resulting weights with "
            "the checkpoint.",
        ),
    ] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Check that the checkpoints of a run are undamaged.

    The exit code is 1 if a check fails, and 0 otherwise.
    """
    run = RunFolder.open(path)
    with waiting("reading the run"):
        from covey.lab.verify import checkpoint_checks

        found = checkpoint_checks(run)
        if recompute:
            from covey.lab.explain.recorded import recomputed

            found.append(recomputed(run))
    if as_json:
        typer.echo(json.dumps({"run": str(path), "checks": [result.row() for result in found]}))
    else:
        show_results(found, Screen(soft_wrap=True))
    if any(result.passed is False for result in found):
        raise typer.Exit(1)


def show_results(found: Sequence[Result], console: Screen) -> None:
    """Print a line for each result of a check, and a remedy for each failed check."""
    for result in found:
        line = f"{result.sign} {result.name:<24} {result.figure}"
        console.print(line, style=STYLES[result.passed])
        if result.passed is False and result.remedy:
            console.print(f"  {'':<24} What to do: {result.remedy}.")


@app.command(SHOW)
def runs_command(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run folder, or a folder that contains runs.")
    ] = Path("runs"),
    step: Annotated[
        int | None,
        typer.Option(
            min=1, help="Show the completions of this training step; FOLDER must be a run folder."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, show the evaluations of a run, or show the completions of a training step."""
    console = Screen(soft_wrap=step is not None)
    if not (path / "config.toml").is_file():
        rows = [_overview(run, run.evaluations()) for run in list_runs(path)]
        if as_json:
            return typer.echo(json.dumps(rows))
        if not rows:
            raise RunError(f"there are no runs in {path}; `covey train` creates a run")
        return _print_runs(rows, console)
    run = RunFolder(path)
    tell_edited(run)
    if step is None:
        _evaluations(run, console, as_json)
    else:
        _completions(run, step, console, as_json)


def _overview(run: RunFolder, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps, settings = run.steps(), settings_of(run)
    model = str(settings.get("model", {}).get("path", "-"))
    return {
        "run": str(run.path),
        "started": str(run.environment(unsaid).get("started", "-"))[:16].replace("T", " "),
        "model": Path(model).name or model,
        "state": _state(run, settings, steps),
        "steps": len(steps),
        "reward": steps[-1].get("objective/scores") if steps else None,
        "greedy_before": evaluations[0]["greedy"]["value"] if evaluations else None,
        "greedy_now": evaluations[-1]["greedy"]["value"] if evaluations else None,
        "checkpoint": run.checkpoints()[-1][0] if run.checkpoints() else None,
    }


def _state(run: RunFolder, settings: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    if run.in_use():
        return "running"
    saved = run.checkpoints()
    if saved and steps and saved[-1][0] == steps[-1]["step"]:
        name, limit = limit_of(settings)
        if (steps[-1].get(name) or 0) >= limit:
            return "done"
    return "failed" if (run.path / FAILURE).exists() else "stopped"


def _print_runs(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not console.is_terminal:  # lines in a pipe can have any width
        console.width = max(console.width, table_width(runs_table(rows)))
    console.print(fitting_table(rows, console.width))


def fitting_table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return the table of runs, with the full names of runs and as many other columns as fit."""
    tables = (runs_table(rows, left_out) for left_out in range(len(LEAST_FIRST)))
    fit = (table for table in tables if table_width(table) <= width)
    return next(fit, runs_table(rows, len(LEAST_FIRST)))


def table_width(table: Table) -> int:
    return Screen(width=UNLIMITED).measure(table).maximum


def runs_table(rows: Sequence[Mapping[str, Any]], left_out: int = 0) -> Table:
    """Return the table of runs without the `left_out` least important columns."""
    shown = [key for key in FORMS if key not in LEAST_FIRST[:left_out]]
    names = [key.replace("_", " ") for key in shown]
    table = Table(Column("run", overflow="fold"), *names)
    for row in rows:
        table.add_row(cell(row["run"]), *(_number(row[key], FORMS[key]) for key in shown))
    return table


def _number(value: float | str | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _evaluations(run: RunFolder, console: Console, as_json: bool) -> None:
    evaluations = run.evaluations()
    if as_json:
        typer.echo(json.dumps({**_overview(run, evaluations), "evaluations": evaluations}))
        return
    if not evaluations:
        _print_runs([_overview(run, evaluations)], console)
        console.print("This run has no evaluations (evaluate.every).", style="dim")
    names = ("step", "greedy, 95 % interval", "reward", "best constant", "distinct", "tokens")
    table = Table(*names, title=cell(run.path))
    for row in evaluations:
        table.add_row(
            str(row["step"]),
            estimate_text("greedy", row["greedy"]),
            estimate_text("reward", row["reward"]) if "reward" in row else "-",
            _number(row.get("best_constant"), ".1%"),
            _number(row.get("distinct_answers"), "d"),
            _number(row.get("mean_tokens"), ".1f"),
        )
    if evaluations:
        console.print(table)


def _completions(run: RunFolder, step: int, console: Console, as_json: bool) -> None:
    rows = run.usable_rollouts(step)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    prompt_id = None
    for row in rows:
        if row["prompt_id"] != prompt_id:
            prompt_id = row["prompt_id"]
            console.print(f"\n{row['prompt']}   (target: {row['target']})", style="bold")
        reward = "unscored" if row["reward"] is None else f"reward {row['reward']:.2f}"
        advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.2f}"
        style = "green" if row["success"] else "default"
        turns = list(turn_lines(row))
        shown = f"({row['finish']})" if turns else row["text"]
        console.print(f"  {reward}{advantage}  {shown}", style=style)
        for line, trained in turns:  # messages that the policy did not write are dimmed
            console.print(f"    {line}", style="default" if trained else "dim")
