"""Terminal tables and descriptions of algorithms, tasks and rewards."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from covey.screen import Screen, cell


def show_list(headings: tuple[str, str], rows: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and one-line descriptions, with a heading for each column."""
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
