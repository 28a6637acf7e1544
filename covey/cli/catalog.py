"""`covey tasks` lists the tasks, and `covey recipes` lists the packaged configurations."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from covey.cli.screen import Screen, cell
from covey.cli.startup import AsJson, Trust
from covey.config.load import RECIPES, recipe_names


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
    from covey.tasks import TASKS, find_task

    names = [name] if name else sorted(TASKS)
    rows = [described(each, find_task(each)[0], ("name", "bad_rows")) for each in names]
    if as_json:
        return typer.echo(json.dumps(rows[0] if name else rows, default=str))
    if name is None:
        _show("task", [(row["name"], row["text"].partition("\n\n")[0]) for row in rows])
        return Screen().print("covey tasks NAME shows the full description and the options.")
    show_options("task", rows[0])


def described(name: str, maker: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the docstring and the options of the function that makes a task or a reward."""
    options = {
        option: "(must be given)" if p.default is p.empty else repr(p.default)
        for option, p in inspect.signature(maker).parameters.items()
        if option not in without
    }
    return {"name": name, "text": inspect.getdoc(maker) or "", "options": options}


def show_options(section: str, row: dict[str, Any]) -> None:
    """Print the text of a task or a reward, and its options as `section.option = default`."""
    console = Screen(soft_wrap=True)
    console.print(row["name"], style="bold")
    console.print(f"\n{row['text']}\n")
    for option, default in row["options"].items():
        console.print(f"{section}.{option} = {default}")


def recipes_command(as_json: AsJson = False) -> None:
    """List the packaged recipes, which are configurations that commands accept by name."""
    rows = [_recipe(name) for name in recipe_names()]
    if as_json:
        return typer.echo(json.dumps(rows))
    _show("recipe", [(row["name"], row["text"]) for row in rows])
    Screen().print(
        "covey train NAME trains one, covey plan NAME explains it, and covey train NAME "
        "--print-config prints all of its settings."
    )


def _recipe(name: str) -> dict[str, Any]:
    """Return a recipe's name, description, model, task and algorithm."""
    text = (RECIPES / f"{name}.toml").read_text("utf-8")
    head = text.partition("\n\n")[0].splitlines()
    about = " ".join(line.lstrip("# ") for line in head if line.startswith("#"))
    first = re.match(r".{20,}?\.(?=\s|$)", about)  # "Dr. GRPO" ends no sentence
    settings = tomllib.loads(text)
    named = {where: settings.get(where, {}) for where in ("model", "task", "objective")}
    return {
        "name": name,
        "text": first[0] if first else about,
        "model": named["model"].get("path"),
        "task": named["task"].get("name"),
        "algorithm": named["objective"].get("name"),
    }


def _show(heading: str, rows: list[tuple[str, str]]) -> None:
    table = Table(Column(heading, style="bold", no_wrap=True), "", box=SIMPLE, pad_edge=False)
    for name, text in rows:
        table.add_row(cell(name), cell(" ".join(text.split())))
    Screen().print(table)
