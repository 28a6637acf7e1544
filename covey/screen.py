"""The terminal output of all commands, with control characters escaped."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from covey.escape import printable

UNLIMITED = 100_000
"""A console width, in characters, that is larger than the width of any table."""
COMMAND = re.compile(r"(?:^|: |  )covey [a-z]")
"""Matches a line that shows a command of Covey."""
LEAST_WIDTH = 120
"""Minimum width, in characters, of a console that must not cut off the numbers in tables."""


class Screen(Console):
    """A rich console that escapes control characters and does not parse markup.

    Rich's own control codes for colors and progress bars are not escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, with the control characters in strings escaped.

        On a terminal, text that rich would not wrap (`soft_wrap`) is wrapped at spaces.
        """
        soft = self.is_terminal and options.get("soft_wrap", self.soft_wrap)
        width = self.width if soft else UNLIMITED
        shown = (wrapped(printable(o), width) if isinstance(o, str) else o for o in objects)
        super().print(*shown, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render text with control characters escaped; rich also calls this method for tables.

        A table whose words would be cut off is rendered as a list.
        """
        given = options or self.options
        if isinstance(renderable, Table) and self._least_width(renderable) > given.max_width:
            renderable = as_list(renderable)
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)

    def _least_width(self, table: Table) -> int:
        """Return the smallest width at which a table cuts off no word."""
        # Rich would limit the result to the width of the terminal.
        return Measurement.get(self, self.options.update(width=UNLIMITED), table).minimum


def as_list(table: Table) -> Text:
    """Return the rows of a table as lines `heading: value`, for a narrow terminal.

    >>> table = Table("arm", "final")
    >>> table.add_row("grpo", "64.5%")
    >>> as_list(table).plain
    'arm: grpo\\n  final: 64.5%\\n'
    """
    lines = [Text(f"{table.title}", style="italic")] if table.title else []
    columns = [(column.header, [*column.cells]) for column in table.columns]
    for row in range(table.row_count):
        for place, (heading, cells) in enumerate(columns):
            name = f"{heading}: " if heading else ""
            if str(value := cells[row]):
                text = value if isinstance(value, Text) else Text(str(value))
                lines.append(Text(f"{'  ' if place else ''}{name}").append(text))
    lines += [Text(f"{table.caption}", style="dim")] if table.caption else []
    return Text("\n").join(lines).append("\n")


def wide_console() -> Screen:
    """Return a console that never cuts off a table of numbers."""
    console = Screen(soft_wrap=True)
    console.width = max(console.width, LEAST_WIDTH)
    return console


def number_column(name: str) -> Column:
    """Return a table column for numbers."""
    return Column(name, justify="right", no_wrap=True)


def cell(text: object) -> Text:
    """Return a table cell without markup for the library `rich`, and with control characters
    escaped."""
    return Text(printable(str(text)))


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of plain text, without style; notes on a terminal are wrapped at spaces."""
    on_terminal = err and sys.stderr.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else UNLIMITED
    typer.echo(wrapped(printable(text), width), err=err)


def wrapped(text: str, width: int) -> str:
    """Return a text whose lines are wrapped at spaces, for a terminal that would split words.

    Words longer than a line stay whole, and so do lines that end in a command, which a user copies.

    >>> wrapped("one two three", 8)
    'one two\\nthree'
    """
    return "\n".join(
        line if len(line) <= width or COMMAND.search(line) else _wrapped(line, width)
        for line in text.split("\n")
    )


def _wrapped(line: str, width: int) -> str:
    rows = textwrap.wrap(
        line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(rows)
