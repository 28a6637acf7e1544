"""Writes the report files of a comparison.

    report.html   one page that opens offline, without other files
    report.md     the same tables, for a comment
    report.json   everything, for programs; docs/compare-report.md describes each field

A report depends only on the runs, so two reports of the same runs are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey._version import __version__
from covey.escape import printable
from covey.lab.compare import report_tables as tables
from covey.lab.compare.arm_results import AXES
from covey.lab.compare.comparison import Comparison, Point, RunResult
from covey.lab.compare.conclusion import conclude, count
from covey.lab.compare.report_contents import ReportContents, report_contents
from covey.lab.page.render import (
    TextTable,
    embedded_json,
    fenced,
    page_file,
    render,
    script,
    security_policy,
    style_sheet,
)
from covey.records.files import finite, write_text

SCHEMA = 4
"""The format version of report.json, which increases when a field is renamed, removed or
redefined."""
COLOURS = 8
"""The number of arm colors in the style sheet; further arms reuse the colors with dashed lines."""
LONGEST_COMPLETION = 3000
"""The maximum number of characters of a completion in the HTML report."""
MISSING = "Charts are left out: they need plotly, from pip install 'covey[report]'."


def write_reports(folder: Path, comparison: Comparison) -> None:
    """Write report.html, report.md and report.json into the comparison's folder."""
    contents = report_contents(folder, comparison)
    write_text(folder / "report.html", page(contents))
    write_text(folder / "report.md", markdown(contents))
    write_text(folder / "report.json", _json(report_data(contents)))


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON text with one line for each top-level field, so that a field is easy to find."""
    dump = partial(json.dumps, allow_nan=False, default=str)
    lines = [f"{dump(name)}: {dump(finite(value))}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def report_data(contents: ReportContents) -> dict[str, Any]:
    """Return the contents of report.json as a dict."""
    comparison, texts = contents.comparison, contents.texts
    evaluated = (run.points[0].correct for run in comparison.runs if run.points)
    return {
        "schema": SCHEMA,
        "covey": __version__,
        "name": comparison.name,
        "command": comparison.command,
        "compared_by": comparison.by,
        "best_constant": comparison.best_constant,
        "budget": {"kind": comparison.budget, "amount": comparison.amount},
        "seeds": list(comparison.seeds),
        "arms": [{"name": a.name, "differences": dict(a.differences)} for a in comparison.arms],
        "conclusion": asdict(contents.conclusion),
        "prompts": [
            dict(zip(("id", "prompt", "target"), (id_, *texts.get(id_, (None, None))), strict=True))
            for id_ in next(evaluated, ())
        ],
        "runs": [_run(run) for arm in comparison.arms for run in comparison.runs_of(arm.name)],
        "curves": [
            {name: getattr(curve, name) for name in ("arm", "x", "mean", "low", "high")}
            for curve in contents.curves
        ],
        "agreement": asdict(contents.agreement) if contents.agreement is not None else None,
        "completions": {
            "seed": contents.example_seed,
            "examples": [asdict(example) for example in contents.examples],
        },
        "health": {panel: [asdict(t) for t in trends] for panel, trends in contents.health.items()},
        "findings": [dict(finding) for finding in comparison.findings],
        "environment": dict(comparison.environment),
        "config_toml": comparison.config_toml,
    }


def _run(run: RunResult) -> dict[str, Any]:
    names = ("arm", "seed", "state", "error", "folder", "weights", "memory_gib", "cpu_seconds")
    return {name: getattr(run, name) for name in names} | {
        "evaluations": list(map(_point, run.points))
    }


def _point(point: Point) -> dict[str, Any]:
    names = ("step", "tokens", "updates", "seconds", "accuracy")
    # One character per prompt keeps the file small.
    correct = "".join("01"[each] for each in point.correct.values())
    rewards = {} if point.by == "success" else {"reward": point.value}
    return {name: getattr(point, name) for name in names} | {"correct": correct, **rewards}


# The report for the terminal.


def terminal_report(comparison: Comparison) -> RenderableType:
    """Return the report for a terminal: headline, tables, cautions, summaries and findings."""
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
    made = [tables.result_table(found), tables.cost_table(found)]
    return Group(*lines[:1], *(_table(one) for one in made if one.rows), *lines[1:])


def _table(made: TextTable) -> Table:
    table = Table(title=_text(made.title), caption=_text(made.note))
    for number, heading in enumerate(made.head):
        table.add_column(_text(heading), justify="right" if number else "left")
    for row in made.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(text: str, style: str = "") -> Text:
    """Return text without control characters and rich markup, for a terminal."""
    return Text(printable(text), style=style)


# The report as HTML and as Markdown, from the templates in covey/lab/page.


def page(contents: ReportContents) -> str:
    """Return the HTML report, from the template comparison.html."""
    comparison, library = contents.comparison, _plotly_source()
    chart_data = {  # what comparison.js draws
        "arms": [arm.name for arm in comparison.arms],
        "by": comparison.by,
        "axes": {name: label for name, (label, _) in AXES.items()},
        "curves": [asdict(curve) for curve in contents.curves],
        "health": {panel: [asdict(t) for t in trends] for panel, trends in contents.health.items()},
    }
    scripts = [library, page_file("comparison.js")] if library is not None else []
    about = (
        f"{count(len(comparison.arms), 'arm')}, {count(len(comparison.seeds), 'seed')} each, "
        f"{comparison.amount:,} {comparison.budget} per run"
    )
    return _rendered(
        "comparison.html",
        contents,
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
        chart_data=embedded_json(finite(chart_data), "chart-data"),
    )


def markdown(contents: ReportContents) -> str:
    """Return the Markdown report, from the template comparison.md.

    The Markdown report can be posted as a comment on GitHub.
    """
    return _rendered("comparison.md", contents, fenced=fenced)


def _rendered(name: str, contents: ReportContents, **values: Any) -> str:
    return render(
        name,
        contents=contents,
        comparison=contents.comparison,
        conclusion=contents.conclusion,
        tables=tables,
        by=contents.comparison.by,
        environment=json.dumps(dict(contents.comparison.environment), indent=2, default=str),
        **values,
    )


def _plotly_source() -> str | None:
    """Return the script of plotly, or None if plotly is not installed.

    Without plotly, the report has no charts.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return str(get_plotlyjs())
