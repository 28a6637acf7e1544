"""`covey tasks`: list the tasks, or describe one task with its options."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from covey.cli.lists import described, show_list, show_options
from covey.cli.startup import AsJson, Trust
from covey.screen import Screen


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
