"""Pieces of a web page. Whatever is not marked as markup is escaped when it is put in one."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from covey.escape import printable, printable_data


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def safe(value: object) -> Html:
    """Return markup as it is, and anything else escaped, with nothing hidden in it."""
    return value if isinstance(value, Html) else Html(escape(printable(str(value)), quote=True))


def join(children: Iterable[object]) -> Html:
    """Put pieces one after another."""
    return Html("".join(safe(child) for child in children))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element; `class_` and `aria_label` stand for `class` and `aria-label`.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)), quote=True)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def table(
    caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], *, note: str = ""
) -> Html:
    """Return a table whose first column heads its rows, in a box that scrolls by itself."""
    heads = join(element("th", cell, scope="col") for cell in head)
    body = join(
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell) for cell in row[1:]),
        )
        for row in rows
    )
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", heads)),
        element("tbody", body),
    )
    # Focusable, so that a keyboard can scroll what is too wide for a phone.
    box = element("div", whole, class_="scroll", role="region", tabindex=0, aria_label=caption)
    return element("div", box, *([element("p", note, class_="note")] if note else []))


def details(summary: object, *children: object) -> Html:
    """Return what opens when its summary is pressed."""
    return element("details", element("summary", summary), *children)


def embedded_json(data: object, name: str) -> Html:
    """Return data for a script to read. Nothing in it can end the element."""
    text = json.dumps(printable_data(data), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')


def script(source: str) -> Html:
    """Return a script of ours."""
    assert "</script" not in source.lower()
    return Html(f"<script>{source}</script>")


def policy(scripts: Iterable[str]) -> Html:
    """Return a rule for the browser: load nothing, and run no script but these.

    Should an answer ever get into the page unescaped, it would still do nothing.
    """
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
        for source in scripts
    ]
    rules = {
        "default-src": ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "img-src": ["data:", "blob:"],  # saving a chart as a picture
        "script-src": hashes or ["'none'"],
    }
    content = "; ".join(f"{name} {' '.join(values)}" for name, values in rules.items())
    return Html(f'<meta http-equiv="Content-Security-Policy" content="{content}">')


def finite(value: Any) -> Any:
    """Return plain data in which what JSON does not know, NaN and infinities, is None."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
