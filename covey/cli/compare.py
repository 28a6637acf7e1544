"""`covey compare`: train several algorithms or settings fairly, and report which is better."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from covey.cli.startup import Model, Smoke, Trust, settings_of
from covey.config import toml_value
from covey.errors import ConfigError
from covey.screen import Screen, cell

if TYPE_CHECKING:
    from covey.analysis.compare.comparison_folder import Design
    from covey.analysis.compare.launch import Watch
    from covey.analysis.compare.prepare import Prepared

PARENT = Path("comparisons")
SEEDS = 3
INTERRUPTED = 130

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="Configuration that all arms share: a TOML file or the name of a recipe. "
        "Default: arithmetic.",
    ),
]
Algorithms = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        help="Algorithms to compare, each in an arm of its own.",
    ),
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="'NAME: KEY=VALUE, ...'",
        help="Add an arm with its own settings, such as 'frozen: optimizer.learning_rate=0', or "
        "with other seeds, such as 'again: seed+=1000'.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        help=f"Number of seeds, for each of which every arm trains a run. Default: {SEEDS}.",
    ),
]
Kind = Annotated[
    Literal["steps", "tokens", "updates"],
    typer.Option(
        "--budget",
        help="Unit of the training budget: training steps, sampled tokens, or optimizer steps "
        "('updates').",
    ),
]
Amount = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10**15,
        help="Training budget of each run, in the unit that --budget names. Default: train.steps "
        "of the configuration.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting for all arms."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Folder of the comparison to start or resume. Default: the folder in comparisons/ "
            "that has the same settings, or else a new folder comparisons/NAME-N."
        )
    ),
]
Add = Annotated[
    str,
    typer.Option(
        metavar="A,B", help="Add these algorithms as new arms to the comparison in --folder."
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Number of runs to train at the same time. Default: 1 on a GPU; on a CPU, the "
        "number of cores divided by the number of threads per run.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Number of CPU threads per run. Default: the number of CPU cores divided by the "
        "number of runs.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FOLDER",
        help="Write the reports of this comparison again, without training.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the arms, seeds and budget, without training."),
]


def compare_command(
    source: Source = None,
    algorithms: Algorithms = "",
    arms: Arms = None,
    seeds: Seeds = None,
    budget: Kind = "steps",
    amount: Amount = None,
    overrides: Overrides = None,
    model: Model = None,
    smoke: Smoke = False,
    trust: Trust = None,
    folder: Folder = None,
    add: Add = "",
    parallel: Parallel = None,
    threads: Threads = None,
    report: Report = None,
    plan_only: DryRun = False,
) -> None:
    """Train several arms (algorithms or settings) under equal conditions, and compare the results.

    All arms start from the same weights, with the same prompts, training budget and held-out
    prompts. The report shows which differences are significant. After Ctrl-C or a crash, run the
    same command again to resume the comparison.
    """
    if report is not None:
        return _write_report(report)
    from covey.analysis.compare.design import Request, parse_arm
    from covey.analysis.compare.prepare import checked, extend, prepare

    request = Request(
        source=source or "arithmetic",
        overrides=tuple(settings_of(overrides, model)),
        smoke=smoke,
        algorithms=_names(algorithms),
        arms=tuple(parse_arm(arm) for arm in arms or []),
        seeds=seeds or SEEDS,
        budget=budget,
        amount=amount,
        threads=threads or 0,
    )
    new = bool(source or algorithms or request.overrides or smoke or amount or budget != "steps")
    if folder is not None and (folder / "comparison.toml").is_file() and not new:
        prepared = extend(folder, _names(add), request.arms, seeds, request.threads)
    elif add:
        raise ConfigError("--add needs an existing comparison in --folder, and no new settings")
    else:
        prepared = prepare(request, PARENT, folder)
    _run(checked(prepared), parallel, plan_only)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print_design(folder: Path, design: Design) -> None:
    """Print the arms of the comparison, the settings that differ, and warnings."""
    from covey.analysis.compare.conclusion import count
    from covey.analysis.compare.report_tables import NO_OPTION, finding_title

    console = Screen(soft_wrap=True)
    runs = len(design.arms) * len(design.seeds)
    seeds = ", ".join(str(seed) for seed in design.seeds)
    console.print(
        f"{count(runs, 'run')} of {design.amount} {design.budget}: "
        f"{count(len(design.arms), 'arm')}, seeds {seeds}, "
        f"{count(design.threads, 'thread')} each, in {folder}",
    )
    table = Table("arm", "differences from the common configuration")
    for arm in design.arms:
        lines = [
            f"{key} = {NO_OPTION if v is None else v if key == 'seed' else toml_value(v)}"
            for key, v in arm.differences.items()
        ]
        table.add_row(cell(arm.name), cell("\n".join(lines) or "none"))
    console.print(table)
    for row in design.findings:
        text = Text().append(f"{finding_title(row)}\n", style="yellow")
        text.append(f"  {row['why']}\n  remedy: {row['remedy']}", style="dim")
        console.print(text)


def _run(prepared: Prepared, parallel: int | None, plan_only: bool) -> None:
    """Print what is compared, run all unfinished runs, and write the reports."""
    from covey.analysis.compare.comparison_folder import write_design
    from covey.analysis.compare.launch import make_jobs, run_jobs
    from covey.analysis.compare.prepare import parallel_runs
    from covey.run.files import write_text
    from covey.run.folder import RunFolder
    from covey.run.provenance import describe_environment

    folder, design = prepared.folder, prepared.design
    _print_design(folder, design)
    if plan_only:
        return
    # This loads the model, so that a wrong model fails before anything is written.
    jobs = make_jobs(folder, design)
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        if prepared.previous != design:
            write_design(folder, design)
        if prepared.previous is None:
            about = describe_environment(min(design.seeds), "", design.threads)
            del about["command"], about["device"]
            write_text(folder / "environment.json", json.dumps(about, indent=2) + "\n")
        with _progress(design) as watch:
            running = run_jobs(folder, jobs, parallel or parallel_runs(design), watch)
    if running.stopping:
        typer.echo("stopped; progress is saved; run the same command again to resume")
        raise typer.Exit(INTERRUPTED)
    _write_report(folder)
    if running.having("failed"):
        raise typer.Exit(1)


@contextmanager
def _progress(design: Design) -> Iterator[Watch]:
    """Return the progress display: a live table for a terminal, plain lines otherwise."""
    from rich.live import Live

    from covey.analysis.compare.progress import Progress

    console = Screen(soft_wrap=True)
    progress = Progress(console=console, budget=design.budget, amount=design.amount)
    if not console.is_terminal:
        yield progress
        return
    with Live(console=console, auto_refresh=False) as live:
        yield replace(progress, live=live)


def _write_report(folder: Path) -> None:
    from covey.analysis.compare.comparison_folder import load_comparison
    from covey.analysis.compare.report_files import terminal_report, write_reports

    comparison = load_comparison(folder)
    write_reports(folder, comparison)
    console = Screen(soft_wrap=True)
    console.print(terminal_report(comparison))
    lines = [
        f"failed: {run.arm} seed {run.seed}: {run.error}"
        for run in comparison.runs
        if run.state == "failed"
    ]
    for line in (*lines, f"report   {folder / 'report.html'}"):
        console.print(line)
