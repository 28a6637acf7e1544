"""How results look in a notebook: small HTML tables with escaped text."""

from __future__ import annotations

import html
from collections.abc import Mapping

from covey.escape import printable


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table with a title and a row for each name and value, as escaped HTML.

    >>> html_table("run", {"step": 3})
    '<table><caption>run</caption><tr><th>step</th><td>3</td></tr></table>'
    """
    cells = "".join(
        f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{_escaped(title)}</caption>{cells}</table>"


def short_repr(name: str, rows: Mapping[str, object]) -> str:
    """Return a `repr` of one line.

    >>> short_repr("Result", {"step": 3})
    'Result(step=3)'
    """
    return f"{name}({', '.join(f'{key}={value}' for key, value in rows.items())})"


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))
