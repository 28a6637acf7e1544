"""Writes the HTML and Markdown reports of a run.

    report.html   one page that opens offline and runs no script
    report.md     the same for a comment or a wiki, with report.svg for its curves

A report depends only on the run, so two reports of the same run are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from covey._version import __version__
from covey.lab.page import Trend, fenced, render, security_policy, style_sheet
from covey.lab.report.contents import KINDS, RunReport, run_report
from covey.records.files import write_text
from covey.records.folder import RunFolder

LONGEST = 3000
"""The maximum number of characters of a completion in the report."""


def write_run_report(run: RunFolder, folder: Path) -> list[Path]:
    """Write the report of a run into a folder, and return the paths of the written files."""
    report = run_report(run)
    files = {"report.html": html(report), "report.md": markdown(report)}
    if report.trends:
        files["report.svg"] = sheet(list(report.trends.items()))
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def html(report: RunReport) -> str:
    """Return the page."""
    style = style_sheet() + STYLE
    return _rendered("run.html", report, policy=security_policy([]), style=style, svg=svg)


def markdown(report: RunReport) -> str:
    """Return the Markdown."""
    return _rendered("run.md", report, fenced=lambda text: fenced(text[:LONGEST]))


def _rendered(name: str, report: RunReport, **values: Any) -> str:
    return render(name, report=report, kinds=KINDS, longest=LONGEST, version=__version__, **values)


# Curves as SVG without scripts, so that they also appear offline, in print and in mail.

WIDTH, HEIGHT = 360, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, for the ticks of an axis.

    >>> ticks(0.0, 1.0, 4)
    [0.0, 0.5, 1.0]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def svg(title: str, trend: Trend) -> Markup:
    """Return the chart of a metric as SVG without a style sheet."""
    x0, x1 = _range(trend.steps, 0.0)
    y0, y1 = _range(trend.values, 0.06)
    across = (WIDTH - LEFT - RIGHT) / (x1 - x0)
    down = (HEIGHT - TOP - BOTTOM) / (y1 - y0)

    def px(x: float) -> str:
        return f"{LEFT + (x - x0) * across:.1f}"

    def py(y: float) -> str:
        return f"{TOP + (y1 - y) * down:.1f}"

    points = " ".join(f"{px(x)},{py(y)}" for x, y in zip(trend.steps, trend.values, strict=True))
    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y)}" y2="{py(y)}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{py(y)}" dy="4" text-anchor="end">{y:g}</text>'
        for y in ticks(y0, y1, 4)
    ]
    grid += [
        f'<text x="{px(x)}" y="{HEIGHT - 6}" text-anchor="middle">{x:g}</text>'
        for x in ticks(x0, x1, 5)
    ]
    told = f"{title}: {trend.values[0]:.4g} at step {trend.steps[0]:g}, {trend.values[-1]:.4g} at "
    told += f"step {trend.steps[-1]:g}"
    dot = f'<circle cx="{px(trend.steps[-1])}" cy="{py(trend.values[-1])}" r="3" class="dot"/>'
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'class="curve" aria-label="{escape(told)}">{"".join(grid)}'
        f'<polyline points="{points}" class="line"/>{dot}</svg>'
    )


STYLE = (
    ".curve { width: 100%; } .curve text { font: 10px system-ui, sans-serif; fill: var(--quiet); } "
    ".curve .grid { stroke: var(--grid); } "
    ".curve .line { fill: none; stroke: var(--arm-0); stroke-width: 1.8; } "
    ".curve .dot { fill: var(--arm-0); }"
)
"""The CSS rules of the charts. The colors of the charts are CSS variables, which the page
defines."""


def sheet(charts: Sequence[tuple[str, Trend]]) -> str:
    """Return one SVG file with all charts, for the Markdown report."""
    rows = -(-len(charts) // 2)
    parts = []
    for number, (title, trend) in enumerate(charts):
        x, y = number % 2 * (WIDTH + 20), number // 2 * (HEIGHT + 34)
        label = (
            f'<text x="{LEFT}" y="16" class="title">{escape(f"{title} ({trend.metric})")}</text>'
        )
        parts.append(
            f'<g transform="translate({x} {y})">{label}<svg y="24" width="{WIDTH}" '
            f'height="{HEIGHT}">{svg(title, trend)}</svg></g>'
        )
    colours = (
        ":root { --quiet: #57606a; --grid: #d5dae0; --arm-0: #0072b2; } "
        "@media (prefers-color-scheme: dark) "
        "{ :root { --quiet: #a3acb8; --grid: #363d47; --arm-0: #56a8e0; } } "
        ".title { font: 600 13px system-ui, sans-serif; fill: var(--quiet); } "
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 20} '
        f'{rows * (HEIGHT + 34)}"><style>{colours}{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    gap = margin * (high - low) if high > low else 0.1 * abs(high) or 0.5
    return low - gap, high + gap
