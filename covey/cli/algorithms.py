"""`covey algorithms`: list all algorithms, or describe the formula and options of one algorithm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from covey.cli.lists import show_list
from covey.cli.startup import AsJson, Trust
from covey.config.algorithm_names import ALGORITHM_NAMES, ALGORITHM_TITLES, check_algorithm_name
from covey.screen import Screen

if TYPE_CHECKING:
    from covey.objective.describe import Description


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
    if as_json or name is not None:
        from covey.objective.describe import describe  # imports torch, which takes seconds

        found = [describe(each) for each in ([name] if name else ALGORITHM_NAMES)]
        if not as_json:
            return _show_algorithm(found[0])
        rows = [{**d._asdict(), "own": [option._asdict() for option in d.own]} for d in found]
        return typer.echo(json.dumps(rows[0] if name else rows))
    show_list(("name", "paper"), ALGORITHM_TITLES.items())
    Screen().print("covey algorithms NAME shows the formula and the options.")


def _show_algorithm(description: Description) -> None:
    from covey.objective.describe import shared_options

    console = Screen(soft_wrap=True)
    console.print(f"{description.name}  ", style="bold", end="")
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
