"""`covey algorithms`: what there is, and what each of it means."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from covey.cli.screen import Screen
from covey.cli.startup import Trust


def algorithms_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One algorithm, in full.")
    ] = None,
    trust: Trust = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the algorithms, or show one: formula, source, defaults, departures."""
    from covey.objective import ALGORITHMS  # imports torch, which takes seconds
    from covey.objective.describe import describe

    console = Screen(soft_wrap=name is not None)
    if as_json:
        names = [name] if name else list(ALGORITHMS)
        described = [describe(n)._asdict() for n in names]
        for one in described:
            one["own"] = [option._asdict() for option in one["own"]]
        typer.echo(json.dumps(described[0] if name else described))
    elif name is None:
        console.print(_table(list(ALGORITHMS)))
        console.print("covey algorithms NAME shows the formula, the source and the options.")
    else:
        _show(name, console)


def _table(names: list[str]) -> Table:
    """Return three lines for each algorithm, so that 80 columns hold every name in one piece."""
    from covey.objective.describe import describe

    table = Table(
        Column("name", no_wrap=True),
        Column("advantage\nratio\nsurrogate", overflow="fold"),
        Column("weights\nclip\nKL; needs", overflow="fold"),
        box=SIMPLE,
        pad_edge=False,
    )
    for name in names:
        one = describe(name)
        pieces = one.pieces
        kl_and_needs = "; ".join(filter(None, [one.kl, ", ".join(one.needs)]))
        table.add_row(
            f"[bold]{name}[/]",
            f"{pieces['advantage']}\n{pieces['ratio']}\n{pieces['surrogate']}",
            f"{pieces['weights']}\n{one.clip}\n{kl_and_needs}",
        )
    return table


def _show(name: str, console: Console) -> None:
    from covey.objective.describe import describe, shared_options

    description = describe(name)
    console.print(f"[bold]{name}[/]  ", end="")
    console.print(description.title, markup=False, highlight=False)
    console.print(f"\n{description.text}\n", markup=False, highlight=False)
    for kind, piece in description.pieces.items():
        console.print(f"{kind:10} {piece}", markup=False, highlight=False)
    console.print(f"{'KL':10} {description.kl}", highlight=False)
    console.print(f"{'needs':10} {', '.join(description.needs) or '-'}\n", highlight=False)
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
