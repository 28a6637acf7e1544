"""HTML elements. Text that is not marked as `Html` is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from covey.escape import printable, printable_data


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def safe(value: object) -> Html:
    """Return HTML unchanged and anything else escaped, with control characters made visible."""
    return value if isinstance(value, Html) else Html(escape(printable(str(value)), quote=True))


def join(children: Iterable[object]) -> Html:
    """Concatenate children."""
    return Html("".join(safe(child) for child in children))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element; `class_` and `aria_label` stand for `class` and `aria-label`.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)), quote=True)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{text}>{join(children)}</{name}>")


def table(
    caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], *, note: str = ""
) -> Html:
    """Return a table whose first column heads its rows, in a box that scrolls."""
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
    # Focusable, so that the keyboard can scroll a table that is wider than the screen.
    box = element("div", whole, class_="scroll", role="region", tabindex=0, aria_label=caption)
    return element("div", box, *([element("p", note, class_="note")] if note else []))


def details(summary: object, *children: object) -> Html:
    """Return a section that unfolds when its summary is clicked."""
    return element("details", element("summary", summary), *children)


def embedded_json(data: object, name: str) -> Html:
    """Return data for a script, escaped so that it cannot end the element."""
    text = json.dumps(printable_data(data), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')


def script(source: str) -> Html:
    """Return one of our scripts."""
    assert "</script" not in source.lower()
    return Html(f"<script>{source}</script>")


def security_policy(scripts: Iterable[str]) -> Html:
    """Return a Content-Security-Policy that loads nothing and runs only these scripts.

    A completion that got into the page unescaped could still not do anything.
    """
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
        for source in scripts
    ]
    rules = {
        "default-src": ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "img-src": ["data:", "blob:"],  # to save a chart as an image
        "script-src": hashes or ["'none'"],
    }
    content = "; ".join(f"{name} {' '.join(values)}" for name, values in rules.items())
    return Html(f'<meta http-equiv="Content-Security-Policy" content="{content}">')


def finite(value: Any) -> Any:
    """Return plain data with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
