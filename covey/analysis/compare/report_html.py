"""The HTML report: one file that opens offline, without other files. Template: page/report.html."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from covey._version import __version__
from covey.analysis.compare import report_tables as tables
from covey.analysis.compare.conclusion import count
from covey.analysis.compare.learning_curves import AXES
from covey.analysis.compare.report_contents import ReportContents
from covey.analysis.compare.report_tables import cost_table
from covey.analysis.page.html import (
    embedded_json,
    page_file,
    script,
    security_policy,
    style_sheet,
    template,
    visible,
)
from covey.escape import finite

HERE = "covey.analysis.compare"
COLOURS = 8
"""Number of colors for arms in the style sheet; further arms reuse them with dashed lines."""
LONGEST_COMPLETION = 3000
"""The report cuts off a completion after this number of characters."""
MISSING = "Charts are left out: they need plotly, from pip install 'covey[ui]'."


def page(contents: ReportContents) -> str:
    """Return the HTML of the report."""
    comparison, library = contents.comparison, _plotly_source()
    scripts = [library, page_file("report.js", HERE)] if library is not None else []
    about = (
        f"{count(len(comparison.arms), 'arm')}, {count(len(comparison.seeds), 'seed')} each, "
        f"{comparison.amount:,} {comparison.budget} per run"
    )
    return render_page(
        "report.html",
        contents,
        finalize=visible,
        axes=AXES,
        colours={arm.name: number % COLOURS for number, arm in enumerate(comparison.arms)},
        longest=LONGEST_COMPLETION,
        missing=MISSING,
        about=about,
        # The text after a colon may begin with an arm's name, so its first letter stays as it is.
        headline=re.split(r"(?<=[:.]) ", contents.conclusion.headline, maxsplit=1),
        version=__version__,
        style=style_sheet(),
        policy=security_policy(scripts),
        scripts=[script(source) for source in scripts],
        chart_data=embedded_json(finite(_chart_data(contents)), "chart-data"),
    )


def render_page(
    name: str, contents: ReportContents, finalize: Callable[[Any], Any], **values: Any
) -> str:
    """Render a template of the page folder; `finalize` escapes everything that is not `Markup`."""
    about = json.dumps(dict(contents.comparison.environment), indent=2, default=str)
    return template(name, HERE, finalize).render(
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


def _plotly_source() -> str | None:
    """Return plotly's script, or None if plotly is missing; the report then has no charts."""
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
