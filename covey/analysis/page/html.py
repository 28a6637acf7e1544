"""HTML reports that open offline and in which text from a model cannot run scripts.

Jinja escapes all text that is inserted into a template, except `Markup` (trusted HTML, CSS or
scripts).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, Template
from markupsafe import Markup

from covey.escape import printable, printable_data

HERE = "covey.analysis.page"


def page_file(name: str, package: str = HERE) -> str:
    """Return the text of a template, style sheet or script in the folder `page` of a package."""
    folder = files(package)
    return (
        (folder if package == HERE else folder.joinpath("page")).joinpath(name).read_text("utf-8")
    )


@functools.cache
def template(name: str, package: str, finalize: Callable[[Any], Any]) -> Template:
    """Return a template of a package, which may import the shared templates in this folder.

    Jinja passes each inserted value through `finalize`, which escapes text that is not `Markup`.
    """
    environment = Environment(
        loader=FunctionLoader(page_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    return environment.from_string(page_file(name, package))


def style_sheet() -> Markup:
    """Return the style sheet of all reports."""
    return Markup(page_file("report.css"))


def visible(value: object) -> object:
    """Make control characters visible in all text that is not markup."""
    return value if isinstance(value, Markup) else printable(str(value))


def embedded_json(data: object, name: str) -> Markup:
    """Return a script element with data as JSON, escaped so that no text ends the element."""
    text = json.dumps(printable_data(data), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def script(source: str) -> Markup:
    """Return one of Covey's scripts as markup."""
    assert "</script" not in source.lower()
    return Markup(source)


def security_policy(scripts: Iterable[str]) -> Markup:
    """Return a Content-Security-Policy that loads nothing and runs only the given scripts.

    With a Content-Security-Policy, even unescaped text of a completion cannot run a script.
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
