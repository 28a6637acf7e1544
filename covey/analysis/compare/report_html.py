"""The HTML report: one file that opens offline and loads nothing. page/report.html is its template.

Jinja escapes all text in the template, except `Markup`, which is already HTML, CSS or a script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from covey._version import __version__
from covey.analysis.compare import report_tables as tables
from covey.analysis.compare.conclusion import count
from covey.analysis.compare.learning_curves import AXES
from covey.analysis.compare.report_contents import ReportContents
from covey.analysis.compare.report_cost import cost_table
from covey.escape import finite, printable, printable_data

COLOURS = 8
"""Colours of arms in the style sheet; further arms reuse them with other dashes."""
LONGEST_COMPLETION = 3000
"""How many characters of a completion are shown."""
MISSING = "Charts are left out: they need plotly, from pip install 'covey[ui]'."


def page(contents: ReportContents) -> str:
    """Return the whole page."""
    comparison, library = contents.comparison, _plotly_source()
    scripts = [library, page_file("report.js")] if library is not None else []
    about = (
        f"{count(len(comparison.arms), 'arm')}, {count(len(comparison.seeds), 'seed')} each, "
        f"{comparison.amount:,} {comparison.budget} per run"
    )
    return render_page(
        "report.html",
        contents,
        finalize=_visible,
        axes=AXES,
        colours={arm.name: number % COLOURS for number, arm in enumerate(comparison.arms)},
        longest=LONGEST_COMPLETION,
        missing=MISSING,
        about=about,
        # The text after a colon may begin with an arm's name, so its first letter stays as it is.
        headline=re.split(r"(?<=[:.]) ", contents.conclusion.headline, maxsplit=1),
        version=__version__,
        style=Markup(page_file("report.css")),
        policy=security_policy(scripts),
        scripts=[script(source) for source in scripts],
        chart_data=embedded_json(finite(_chart_data(contents)), "chart-data"),
    )


def render_page(
    template: str, contents: ReportContents, finalize: Callable[[Any], Any], **values: Any
) -> str:
    """Render a template of the page folder; `finalize` escapes what is not markup."""
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    about = json.dumps(dict(contents.comparison.environment), indent=2, default=str)
    return environment.from_string(page_file(template)).render(
        contents=contents,
        comparison=contents.comparison,
        conclusion=contents.conclusion,
        tables=tables,
        cost_table=cost_table,
        by=compared(contents),
        environment=about,
        **values,
    )


def compared(contents: ReportContents) -> str:
    """Return the metric by which arms are compared: success or reward."""
    return next((arm.by for arm in contents.conclusion.arms if arm.seeds), "success")


def _visible(value: object) -> object:
    """Make control characters visible in everything but markup."""
    return value if isinstance(value, Markup) else printable(str(value))


def page_file(name: str) -> str:
    """Return a file of the page: its template, its style sheet or its script."""
    return files("covey.analysis.compare").joinpath("page", name).read_text(encoding="utf-8")


def _plotly_source() -> str | None:
    """Return plotly's script, or None without plotly: a report is useful without charts."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return str(get_plotlyjs())


def _chart_data(contents: ReportContents) -> dict[str, Any]:
    """Return the data that page/report.js draws."""
    return {
        "arms": [arm.name for arm in contents.comparison.arms],
        "by": compared(contents),
        "axes": {name: label for name, (label, _) in AXES.items()},
        "curves": [asdict(curve) for curve in contents.curves],
        "health": {panel: [asdict(t) for t in trends] for panel, trends in contents.health.items()},
    }


def embedded_json(data: object, name: str) -> Markup:
    """Return data for a script, escaped so that it cannot end the element."""
    text = json.dumps(printable_data(data), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def script(source: str) -> Markup:
    """Return one of our scripts as markup."""
    assert "</script" not in source.lower()
    return Markup(source)


def security_policy(scripts: Iterable[str]) -> Markup:
    """Return a Content-Security-Policy that loads nothing and runs only these scripts.

    So even a completion that got into the page unescaped could not run anything.
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
