"""`covey algorithms`: list the algorithms, or describe one algorithm."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from covey.cli.screen import Screen
from covey.cli.startup import AsJson, Trust
from covey.config.algorithm_names import ALGORITHM_NAMES, ALGORITHM_TITLES, check_algorithm_name


def algorithms_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name of an algorithm, or MODULE:FUNCTION for your own algorithm.",
        ),
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """List all algorithms, or describe one algorithm with its formula and options."""
    if name is not None and "." not in name and ":" not in name:
        check_algorithm_name(name)
    if as_json:
        _print_json(name)
    elif name is not None:
        _show(name, Screen(soft_wrap=True))
    else:
        console = Screen()
        table = Table(
            Column("name", style="bold", no_wrap=True), "paper", box=SIMPLE, pad_edge=False
        )
        for each, title in ALGORITHM_TITLES.items():
            table.add_row(each, title)
        console.print(table)
        console.print("covey algorithms NAME shows the formula and the options.")


def _print_json(name: str | None) -> None:
    from covey.objective.describe import describe  # imports torch, which takes seconds

    rows = []
    for each in [name] if name else ALGORITHM_NAMES:
        row = describe(each)._asdict()
        rows.append({**row, "own": [option._asdict() for option in row["own"]]})
    typer.echo(json.dumps(rows[0] if name else rows))


def _show(name: str, console: Console) -> None:
    from covey.objective.describe import describe, shared_options

    description = describe(name)
    console.print(f"{name}  ", style="bold", end="")
    console.print(description.title)
    console.print(f"\n{description.text}\n")
    for kind, piece in description.pieces.items():
        console.print(f"{kind:10} {piece}")
    console.print(f"{'KL':10} {description.kl}")
    console.print(f"{'needs':10} {', '.join(description.needs) or '-'}\n")
    own = {option.name for option in description.own}
    shared = [option for option in shared_options() if option.name not in own]
    for title, options in (("options", description.own), ("options of every algorithm", shared)):
        table = Table(
            Column("", no_wrap=True), "default", Column("", overflow="fold"),
            title=title, title_justify="left", box=None,
        )  # fmt: skip
        for option in options:
            table.add_row(f"objective.{option.name}", option.default, option.meaning)
        console.print(table)
