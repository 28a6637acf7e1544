"""The terminal. Every command prints through here, so that no text can give it orders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from covey.escape import printable


class Screen(Console):
    """A console that shows control characters instead of sending them.

    Rich's own codes, for colours and for a bar that stays in its place, are no text and pass.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; what is hidden in a text is made visible before it is laid out."""
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render; this is where all that is shown comes through, in tables and bars as well."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def cell(text: object) -> Text:
    """Return a cell of a table: text of which rich makes no markup, and a terminal no orders."""
    return Text(printable(str(text)))


def echo(text: str, *, err: bool = False) -> None:
    """Print a line without any style."""
    typer.echo(printable(text), err=err)
