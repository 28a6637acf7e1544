"""`covey compare`: which algorithm, or which setting, is better."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from covey.cli.screen import Screen, cell
from covey.cli.startup import Model, Smoke, Trust, settings_of
from covey.config import toml_value
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.analysis.compare.design import Asked
    from covey.analysis.compare.place import Place
    from covey.analysis.compare.record import Record
    from covey.analysis.compare.watch import Watching

PARENT = Path("comparisons")
SEEDS = 3
INTERRUPTED = 130

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file or the name of a packaged recipe: what all arms have in common. "
        "Default: arithmetic.",
    ),
]
Algorithms = Annotated[
    str, typer.Option(metavar="A,B", help="An arm for each of these algorithms.")
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="'NAME: KEY=VALUE, ...'",
        help="An arm of your own, such as 'frozen: optimizer.learning_rate=0'; 'again: seed+=1000' "
        "is the common configuration with other seeds.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help=f"Runs of each arm, seed after seed. Default: {SEEDS}."),
]
Kind = Annotated[
    Literal["steps", "tokens", "updates"],
    typer.Option(
        "--budget", help="What every run is given: steps, sampled tokens, or optimizer steps."
    ),
]
Amount = Annotated[
    int | None, typer.Option(min=1, max=10**15, help="How much of it. Default: the recipe's steps.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting for all arms."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="The comparison's folder, new or to go on with. Default: comparisons/NAME-N, the one "
        "that this command has made before if there is one."
    ),
]
Add = Annotated[
    str, typer.Option(metavar="A,B", help="With --folder: algorithms to add to a comparison.")
]
Parallel = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Runs side by side. Default: cores / threads; one on a GPU."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, help="Threads of each run. Default: as many as leave no core idle."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FOLDER", help="Write the reports anew; run nothing."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be compared, and stop.")]


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
    """Train the same model in different ways, fairly, and say which is better, and how sure it is.

    All arms have the same start, first answers, prompts, budget and held-out problems. After Ctrl-C
    or a crash the same command goes on; what is finished is not done again.
    """
    if report is not None:
        return _write_report(report)
    from covey.analysis.compare.design import Asked, parse_arm
    from covey.analysis.compare.place import checked, place

    asked = Asked(
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
    fresh = bool(source or algorithms or asked.overrides or smoke or amount or budget != "steps")
    if folder is not None and (folder / "comparison.toml").is_file() and not fresh:
        found = checked(_grown(folder, asked, _names(add), seeds))
    elif add:
        raise ConfigError("--add takes --folder, the comparison to add to, and no new settings")
    else:
        found = checked(place(asked, PARENT, folder))
    _tell_plan(found.folder, found.record)
    if not plan_only:
        _run(found, parallel)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _grown(folder: Path, asked: Asked, algorithms: tuple[str, ...], seeds: int | None) -> Place:
    from covey.analysis.compare.place import grown

    return grown(folder, algorithms=algorithms, arms=asked.arms, seeds=seeds, threads=asked.threads)


def _tell_plan(folder: Path, record: Record) -> None:
    """Say what is compared, how the arms differ, and what is known beforehand."""
    from covey.analysis.compare.words import count

    console = Screen(soft_wrap=True)
    runs = len(record.arms) * len(record.seeds)
    seeds = ", ".join(str(seed) for seed in record.seeds)
    console.print(
        f"{count(runs, 'run')} of {record.amount} {record.budget}: "
        f"{count(len(record.arms), 'arm')}, seeds {seeds}, "
        f"{count(record.threads, 'thread')} each, in {folder}",
        markup=False,
        highlight=False,
    )
    table = Table("arm", "differs from the common configuration in")
    for arm in record.arms:
        words = [f"{k} = {_value(k, v)}" for k, v in arm.differences.items()]
        table.add_row(cell(arm.name), cell("\n".join(words) or "nothing"))
    console.print(table)
    for row in record.findings:
        whose = f" ({row['arms']})" if row.get("arms") else ""
        text = Text().append(f"{row['title']}{whose}\n", style="yellow")
        text.append(f"  {row['why']}\n  remedy: {row['remedy']}", style="dim")
        console.print(text)


def _value(key: str, value: object) -> str:
    if value is None:
        return "(it has no such option)"
    return str(value) if key == "seed" else toml_value(value)


def _run(place: Place, parallel: int | None) -> None:
    """Run what is not done, then write the reports."""
    from covey.analysis.compare.jobs import make_jobs
    from covey.analysis.compare.place import settle, side_by_side
    from covey.analysis.compare.run import held, run_jobs
    from covey.run.files import write_text
    from covey.run.provenance import describe_environment

    folder, record = place.folder, place.record
    jobs = make_jobs(folder, record)  # loads the model, and so finds out what is wrong with it
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        settle(place)
        if place.before is None:
            about = describe_environment(min(record.seeds), "", record.threads)
            del about["command"], about["device"]
            write_text(folder / "environment.json", json.dumps(about, indent=2) + "\n")
        with _watching(record) as watch:
            running = run_jobs(folder, jobs, parallel or side_by_side(record), watch)
    if running.stopping:
        typer.echo("stopped, and saved where it stands; the same command goes on")
        raise typer.Exit(INTERRUPTED)
    _write_report(folder)
    if running.of("failed"):
        raise typer.Exit(1)


@contextmanager
def _watching(record: Record) -> Iterator[Watching]:
    """Give what suits standard output."""
    from rich.live import Live

    from covey.analysis.compare.watch import LiveWatch, PlainWatch

    console = Screen(soft_wrap=True)
    if not console.is_terminal:
        yield PlainWatch(console=console, budget=record.budget, amount=record.amount)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveWatch(live=live, budget=record.budget, amount=record.amount)


def _write_report(folder: Path) -> None:
    """Write the reports of what there is, and show the table."""
    from covey.analysis.compare.load import load_comparison
    from covey.analysis.compare.report import terminal_table, write_reports

    comparison = load_comparison(folder)
    write_reports(folder, comparison)
    console = Screen(soft_wrap=True)
    console.print(terminal_table(comparison))
    for run in comparison.outcomes:
        if run.state == "failed":
            console.print(
                f"failed: {run.arm} seed {run.seed}: {run.error}", markup=False, highlight=False
            )
    console.print(f"report   {folder / 'report.html'}", markup=False, highlight=False)
