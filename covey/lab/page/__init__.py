"""Renders reports as HTML that opens offline, or as Markdown.

Jinja escapes text that is inserted into a template, because texts from models may contain HTML or
scripts. Text of the type `Markup` is not escaped, because it is HTML, Markdown, CSS or a script
that Covey trusts. The templates are in the same folder as this module.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from covey.escape import printable, printable_data


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of texts that all report formats can show; the first column has the row names."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A training metric at each step, averaged over the runs of an arm."""

    metric: str
    arm: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


def page_file(name: str) -> str:
    return files("covey.lab.page").joinpath(name).read_text("utf-8")


def render(name: str, **values: Any) -> str:
    """Render a template file in this folder: `*.md` as Markdown, all other files as HTML."""
    return _environment(markdown=name.endswith(".md")).get_template(name).render(**values)


@functools.cache
def _environment(*, markdown: bool) -> Environment:
    return Environment(
        loader=FunctionLoader(page_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=literal if markdown else visible,
    )


def visible(value: object) -> object:
    return value if isinstance(value, Markup) else printable(str(value))


def plain(text: str) -> str:
    """Return text as one line, escaped so that Markdown shows it literally.

    >>> plain("a|b <c> *d*")
    'a\\\\|b &lt;c&gt; \\\\*d\\\\*'
    """
    line = (
        printable(" ".join(text.split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    # A zero-width space after @ keeps GitHub from notifying the user of that name.
    return re.sub(r"([\\|`*_\[\]#~])", r"\\\1", line).replace("@", "@\u200b")


def literal(value: object) -> Markup:
    """Escape a value for a Markdown template, and leave trusted markup unchanged."""
    return value if isinstance(value, Markup) else Markup(plain(str(value)))


def fenced(text: str) -> Markup:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}\n{printable(text.rstrip())}\n{fence}")


def style_sheet() -> Markup:
    return Markup(page_file("report.css"))


def embedded_json(data: object, name: str) -> Markup:
    """Return a script element with data as JSON, escaped so that no text can end the element."""
    text = json.dumps(printable_data(data), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def script(source: str) -> Markup:
    """Return one of Covey's scripts as trusted markup."""
    assert "</script" not in source.lower()
    return Markup(source)


def security_policy(scripts: Iterable[str]) -> Markup:
    """Return a Content-Security-Policy that allows only the given scripts, and no network access.

    This Content-Security-Policy blocks a script in a completion even if a template forgets to
    escape the completion.
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
    return Markup(f'<meta http-equiv="Content-Security-Policy" content="{content}">')
