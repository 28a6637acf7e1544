"""The charts of the page: their data, and the program that draws them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from covey.analysis.compare.curves import AXES, Curve
from covey.analysis.compare.evidence import Evidence
from covey.analysis.compare.outcome import Comparison

COLOURS = 8
"""Of arms in the style sheet; after so many they begin again, with other dashes."""
MISSING = "Charts are left out: they need plotly, from pip install 'covey[ui]'."


def chart_data(
    comparison: Comparison, curves: tuple[Curve, ...], evidence: Evidence
) -> dict[str, Any]:
    """Return what page/report.js draws."""
    return {
        "arms": [arm.name for arm in comparison.arms],
        "axes": {name: label for name, (label, _) in AXES.items()},
        "curves": [curve.row() for curve in curves],
        "health": {
            panel: [trend.row() for trend in trends] for panel, trends in evidence.health.items()
        },
    }


def plotly_source() -> str | None:
    """Return plotly's program for browsers, or None if plotly is not installed.

    A report is worth having without charts, so a missing package is no error.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return str(get_plotlyjs())


def page_file(name: str) -> str:
    """Return a file of the page: its style or its program."""
    return files("covey.analysis.compare").joinpath("page", name).read_text(encoding="utf-8")
