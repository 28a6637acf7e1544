"""The report as Markdown for a GitHub comment, and its summary for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey.analysis.compare import report_tables as tables
from covey.analysis.compare.comparison import Comparison
from covey.analysis.compare.conclusion import conclude
from covey.analysis.compare.report_contents import ReportContents
from covey.analysis.compare.report_cost import cost_table
from covey.analysis.compare.report_html import render_page
from covey.analysis.page.markdown import fenced, literal
from covey.analysis.page.text_table import TextTable
from covey.escape import printable


def terminal_report(comparison: Comparison) -> RenderableType:
    """Return the table of results, the headline, the pairs and the findings."""
    found = conclude(comparison)
    lines = [
        _text(found.headline, style="bold"),
        *(_text(f"! {text}", style="yellow") for text in found.cautions),
        *(_text(f"- {text}") for text in tables.pair_summaries(found)),
    ]
    lines += [
        _text(f"{tables.finding_title(row)}: {row.get('remedy', '')}", style="dim")
        for row in comparison.findings
    ]
    made = [tables.result_table(found), cost_table(found)]
    return Group(*lines[:1], *(_table(one) for one in made if one.rows), *lines[1:])


def _table(made: TextTable) -> Table:
    table = Table(title=_text(made.title), caption=_text(made.note))
    for number, heading in enumerate(made.head):
        table.add_column(_text(heading), justify="right" if number else "left")
    for row in made.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(text: str, style: str = "") -> Text:
    """Return text for a terminal, without rich markup and control characters."""
    return Text(printable(text), style=style)


def markdown(contents: ReportContents) -> str:
    """Return the report for a comment on GitHub; page/report.md is its template."""
    return render_page(
        "report.md",
        contents,
        finalize=literal,
        fenced=fenced,
    )
