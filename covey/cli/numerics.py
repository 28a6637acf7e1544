"""`covey numerics`: differences between the log-probs of engine and trainer."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from covey.cli.startup import (
    STARTING,
    AsJson,
    Model,
    Overrides,
    Say,
    Smoke,
    Trust,
    check_out,
    resolved,
    settings_of,
    waiting,
)
from covey.errors import ConfigError, RunError
from covey.notices import notice
from covey.records.folder import RunFolder
from covey.records.resume import Start, last_good
from covey.records.trackers import Tracker
from covey.screen import cell, echo, number_column, wide_console

if TYPE_CHECKING:
    from covey.config import Config
    from covey.lab.checks.numerics import Report

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG|RUN",
        help="A TOML configuration file, the name of a recipe, or a run folder. For a run folder, "
        "the command measures the newest checkpoint. Default: arithmetic.",
    ),
]
Updates = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Take this many optimizer steps before measuring staleness. The default is "
        "max(1, n - 1), where n is the number of optimizer steps in a training step.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the results to this file as JSON.")
]


def numerics_command(
    target: Target = None,
    overrides: Overrides = None,
    model: Model = None,
    updates: Updates = None,
    out: Out = None,
    smoke: Smoke = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much the log-probs of engine and trainer differ, and why.

    The command generates the rollouts of one training step, and computes their log-probs in several
    ways. The results separate the effects of precision, batch shape, truncation, kernels and
    staleness. The command writes nothing to run folders.
    """
    run = RunFolder.open(Path(target)) if target and Path(target).is_dir() else None
    if run is not None and model is not None:
        raise ConfigError(
            "--model cannot be combined with a run folder, because a run is measured with its own "
            "weights; leave out --model"
        )
    check_out(out)
    source = str(run.config_file) if run is not None else target or "arithmetic"
    if run is not None and run.is_sft:
        raise RunError(
            f"{run.path} is an SFT run, which has no rollouts to measure; to measure a checkpoint "
            "of the run, use covey numerics CONFIG --model CHECKPOINT"
        )
    with waiting(STARTING) as say:
        config = resolved(source, settings_of(overrides, model), smoke=smoke)
        report = _measured(config, run, updates, say)
    if out is not None:
        from covey.records.files import write_text

        write_text(out, json.dumps(report.row(), indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(report.row()))
        return
    _show(report, wide_console())


def _measured(config: Config, folder: RunFolder | None, updates: int | None, say: Say) -> Report:
    from covey.lab.checks.numerics import default_updates, measure
    from covey.run import Run

    say(f"loading {config.model.path}")
    run = Run.build(config)
    with closing(run):
        run.restore(Start() if folder is None else last_good(folder, note=notice))
        wanted = default_updates(config) if updates is None else updates
        completions = config.rollout.prompts_per_step * config.rollout.group_size
        return measure(run, _Notes(say, completions), updates=wanted)


class _Notes(Tracker):
    """Prints notes for the user, and the number of completions sampled so far."""

    def __init__(self, say: Say, completions: int) -> None:
        self.say = say
        self.completions = completions
        self.done = 0

    def sampled(self, count: int) -> None:
        self.done += count
        more = f"completions: {self.done} of {self.completions}"
        self.say("measuring" if self.done >= self.completions else more)

    def note(self, text: str) -> None:
        echo(text, err=True)


def _show(report: Report, console: Console) -> None:
    clip = report.clip
    unit = "completions" if clip.per_completion else "tokens"
    console.print(
        f"{report.model} on {report.device} in {report.dtype}: {report.completions} completions, "
        f"{report.causes[0].gap.tokens} tokens; {report.alone} also generated one at a time, of "
        f"which {report.diverged} diverged",
        style="bold",
    )
    columns = map(number_column, ("mean", "p99", "max", "ratio", "outside", "effective"))
    table = Table(Column("difference", no_wrap=True), *columns, "", box=SIMPLE)
    for cause in report.causes:
        gap = cause.gap
        table.add_row(
            cell(cause.title),
            *(f"{value:.2e}" for value in (gap.mean, gap.p99, gap.max)),
            f"{gap.ratio_mean:.5f}",
            f"{gap.outside:.2%}",
            f"{gap.effective:.2%}",
            gap.severity,
        )
    console.print(table)
    console.print(
        "mean, p99, max: |difference| in nats. ratio: mean of exp(difference). outside: share "
        f"of {unit} whose ratio is not in [{clip.low:.4g}, {clip.high:.4g}], the clip range. "
        f"effective: effective sample size, as a share of all {unit}.",
    )
    console.print(
        "Each line shows one cause. They need not add up to the first line, because rounding "
        "errors partly cancel and the first line does not include staleness."
    )
    for cause in report.causes:
        row = cause.row()
        console.print(f"\n{row['title']}: {row['severity']}", style="bold")
        console.print(f"  {row['what']}.")
        console.print(f"  What to do: {row['advice']}.")
    for note in report.notes:
        console.print(f"\n{note}")
