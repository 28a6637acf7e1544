"""`covey algorithms`, `tasks` and `recipes`: list what there is, or describe one entry."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from covey.cli.startup import AsJson, Trust
from covey.config.algorithm_names import ALGORITHM_NAMES, ALGORITHM_TITLES, check_algorithm_name
from covey.config.load import recipe_names, recipe_text
from covey.screen import Screen, cell

if TYPE_CHECKING:
    from covey.objective.describe import Description


def show_list(headings: tuple[str, str], rows: Iterable[tuple[str, str]]) -> None:
    first, second = headings
    table = Table(Column(first, style="bold", no_wrap=True), second, box=SIMPLE, pad_edge=False)
    for name, text in rows:
        table.add_row(cell(name), cell(" ".join(text.split())))
    Screen().print(table)


def described(name: str, maker: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the docstring and the options of the function that makes a task or a reward."""
    options = {
        option: "(must be given)" if p.default is p.empty else repr(p.default)
        for option, p in inspect.signature(maker).parameters.items()
        if option not in without
    }
    return {"name": name, "text": inspect.getdoc(maker) or "", "options": options}


def show_options(section: str, row: dict[str, Any]) -> None:
    """Print the docstring of a task or a reward, and its options as `section.option = default`."""
    console = Screen(soft_wrap=True)
    console.print(row["name"], style="bold")
    console.print(f"\n{row['text']}\n")
    for option, default in row["options"].items():
        console.print(f"{section}.{option} = {default}")


def recipes_command(as_json: AsJson = False) -> None:
    """List the packaged recipes: configurations that commands accept by name."""
    rows = [_recipe(name) for name in recipe_names()]
    if as_json:
        return typer.echo(json.dumps(rows))
    show_list(("recipe", ""), [(row["name"], row["text"]) for row in rows])
    Screen().print(
        "`covey train NAME` trains one, `covey plan NAME` explains it, and `covey train NAME "
        "--print-config` prints all its settings."
    )


def _recipe(name: str) -> dict[str, Any]:
    text = recipe_text(name)
    head = text.partition("\n\n")[0].splitlines()
    about = " ".join(line.lstrip("# ") for line in head if line.startswith("#"))
    first = re.match(r".{20,}?\.(?=\s|$)", about)  # the period in "Dr. GRPO" ends no sentence
    settings = tomllib.loads(text)
    named = {where: settings.get(where, {}) for where in ("model", "task", "objective")}
    return {
        "name": name,
        "text": first[0] if first else about,
        "model": named["model"].get("path"),
        "task": named["task"].get("name"),
        "algorithm": named["objective"].get("name"),
    }


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


def tasks_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Name of a task, or MODULE:FUNCTION for your own task."
        ),
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or describe one task with its options."""
    from covey.tasks.registry import TASKS, find_task

    names = [name] if name else sorted(TASKS)
    rows = [described(each, find_task(each)[0], ("name", "bad_rows")) for each in names]
    if as_json:
        return typer.echo(json.dumps(rows[0] if name else rows, default=str))
    if name is None:
        show_list(("task", ""), [(r["name"], r["text"].partition("\n\n")[0]) for r in rows])
        return Screen().print("covey tasks NAME shows the full description and the options.")
    show_options("task", rows[0])
