"""`covey recipes`: list the packaged recipes."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import typer

from covey.cli.lists import show_list
from covey.cli.startup import AsJson
from covey.config.load import recipe_names, recipe_text
from covey.screen import Screen


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
    """Return a recipe's name, description, model, task and algorithm."""
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
