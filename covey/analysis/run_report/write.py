"""Write the report of a run.

    report.html   one page that opens offline and runs no script
    report.md     the same for a comment or a wiki, with report.svg for its curves

The report depends only on the run: the same run gives the same files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey._version import __version__
from covey.analysis.page.html import security_policy, style_sheet, template, visible
from covey.analysis.page.markdown import fenced, literal
from covey.analysis.run_report.chart import STYLE, sheet, svg
from covey.analysis.run_report.contents import KINDS, RunReport, run_report
from covey.run.files import write_text
from covey.run.folder import RunFolder

HERE = "covey.analysis.run_report"
LONGEST = 3000
"""The number of characters of a completion that the report shows."""


def write_run_report(run: RunFolder, folder: Path) -> list[Path]:
    """Write the report of a run into a folder; return its files."""
    report = run_report(run)
    files = {"report.html": html(report), "report.md": markdown(report)}
    if report.trends:
        files["report.svg"] = sheet(list(report.trends.items()))
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def html(report: RunReport) -> str:
    """Return the page."""
    return _rendered(
        "run.html",
        report,
        visible,
        policy=security_policy([]),
        style=style_sheet() + STYLE,
        svg=svg,
    )


def markdown(report: RunReport) -> str:
    """Return the Markdown."""
    return _rendered("run.md", report, literal, fenced=lambda text: fenced(text[:LONGEST]))


def _rendered(name: str, report: RunReport, finalize: Callable[[Any], Any], **values: Any) -> str:
    return template(name, HERE, finalize).render(
        report=report, kinds=KINDS, longest=LONGEST, version=__version__, **values
    )
