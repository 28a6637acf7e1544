"""`covey compare`: train several algorithms or settings fairly, and report which is better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from covey.cli.startup import Model, Smoke, Trust, settings_of
from covey.errors import ConfigError
from covey.screen import Screen

if TYPE_CHECKING:
    from covey.lab.compare.design import Prepared

SEEDS = 3
INTERRUPTED = 130

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file or the name of a recipe, with the configuration that all arms share. "
        "Default: arithmetic.",
    ),
]
Algorithms = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        help="Compare these algorithms; each algorithm is one arm.",
    ),
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="'NAME: KEY=VALUE, ...'",
        help="Add an arm with this name and these settings, such as 'wide: "
        "rollout.group_size=16'. The arm 'again: seed+=1000' has other seeds.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        help=f"Number of seeds. Every arm trains one run per seed. Default: {SEEDS}.",
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
        help="Training budget of each run, in the unit that --budget sets. Without --amount, each "
        "run takes train.steps training steps.",
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
            "Start or resume the comparison in this folder. By default, Covey resumes the "
            "comparison in ./comparisons that has the same settings. If there is no such "
            "comparison, Covey starts comparisons/NAME-N."
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
        help="Number of runs to train at the same time. On a GPU, the default is 1. On a CPU, the "
        "default is the number of cores divided by --threads.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Number of CPU threads per run. The default is the number of CPU cores divided by "
        "the number of runs in the comparison.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FOLDER",
        help="Only rewrite the reports of the comparison in this folder.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the arms, seeds and budget, without training."),
]
MISPLACED_ADD = (
    "--add needs the --folder of an existing comparison, and cannot be combined with CONFIG, "
    "--algorithms, --set, --model, --smoke, --budget or --amount"
)


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

    All arms have the same initial weights, prompts and training budget. The report shows which
    differences are significant. After a crash, the same command resumes the comparison.
    """
    from covey.lab.compare.design import Request, checked, extend, parse_arm, prepare
    from covey.lab.compare.report import write_report

    if report is not None:
        return write_report(report, Screen(soft_wrap=True))
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
        raise ConfigError(MISPLACED_ADD)
    else:
        prepared = prepare(request, folder)
    _run(checked(prepared), parallel, plan_only)


def _run(prepared: Prepared, parallel: int | None, plan_only: bool) -> None:
    """Print the design of a comparison and, unless --dry-run is given, run the comparison."""
    from covey.lab.compare.launch import run_comparison, show_design

    console = Screen(soft_wrap=True)
    show_design(prepared, console)
    if plan_only:
        return
    running = run_comparison(prepared, parallel, console)
    if running.stopping:
        console.print("stopped; progress is saved; run the same command again to resume")
        raise typer.Exit(INTERRUPTED)
    if running.having("failed"):
        raise typer.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
