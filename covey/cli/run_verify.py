"""`covey runs verify`: check that the records of a run agree with each other and with its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli.screen import Screen
from covey.cli.startup import AsJson, Trust, waiting
from covey.run.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.analysis.doctor.result import Result

STYLES = {True: "green", False: "bold red", None: "dim"}


def verify_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Also train the last saved step again, and compare the resulting weights with the "
            "checkpoint.",
        ),
    ] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Check that no step, prompt or rollout of a run is lost, repeated or changed.

    The command compares the configuration, data, reward, rollouts, steps and checkpoints of the run
    with each other. The exit code is 0 if all records agree, and 1 otherwise.
    """
    run = RunFolder.open(path)
    with waiting("reading the run"):
        from covey.analysis.verify.chain import chain_checks

        found = list(chain_checks(run))
        if recompute:
            from covey.analysis.verify.recompute import recomputed

            found.append(recomputed(run))
    if as_json:
        typer.echo(json.dumps({"run": str(path), "checks": [result.row() for result in found]}))
    else:
        show_results(found, Screen(soft_wrap=True))
    if any(result.passed is False for result in found):
        raise typer.Exit(1)


def show_results(found: Sequence[Result], console: Screen) -> None:
    """Print a line for each result, and a remedy for each failed check."""
    for result in found:
        line = f"{result.sign} {result.name:<24} {result.figure}"
        console.print(line, style=STYLES[result.passed])
        if result.passed is False and result.remedy:
            console.print(f"  {'':<24} What to do: {result.remedy}.")
