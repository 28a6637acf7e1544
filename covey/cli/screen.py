"""Terminal output with control characters escaped, used by every command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from covey.escape import printable


class Screen(Console):
    """A rich console that escapes control characters and does not parse markup.

    Rich's own control codes for colours and progress bars are not escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, with control characters escaped before rich computes the layout."""
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render text with control characters escaped; rich also calls this method for tables."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def cell(text: object) -> Text:
    """Return a table cell that rich does not parse as markup, with control characters escaped."""
    return Text(printable(str(text)))


def echo(text: str, *, err: bool = False) -> None:
    """Print a line without style."""
    typer.echo(printable(text), err=err)
