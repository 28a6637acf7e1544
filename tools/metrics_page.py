"""Write docs/metrics.md from the registry of metrics: python -m tools.metrics_page FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from covey.records.metric_registry import METRICS, SOURCES, Metric

HEAD = "| metric | meaning | unit | over | healthy | elsewhere |"


def table() -> str:
    """Return the metrics registry as a Markdown table."""
    rows = [_row(name, entry) for name, entry in METRICS.items()]
    sources = [f"- *{name}*: {text}" for name, text in SOURCES.items()]
    return "\n".join([HEAD, "|---|---|---|---|---|---|", *rows, "", *sources]) + "\n"


def _row(name: str, entry: Metric) -> str:
    names = {"open-instruct": entry.open_instruct, "TRL": entry.trl}
    elsewhere = ", ".join(f"{tool} `{other}`" for tool, other in names.items() if other)
    definition = entry.definition.replace("|", "\\|")
    cells = [f"`{name}`", definition, entry.unit, entry.source, healthy(entry), elsewhere]
    return f"| {' | '.join(cells)} |"


def healthy(entry: Metric) -> str:
    """Return the healthy range of a metric in words, or an empty string if it has none.

    >>> healthy(Metric("", healthy=(None, 15.0))), healthy(Metric("", healthy=(0.9, 1.1)))
    ('at most 15', '0.9 to 1.1')
    """
    if entry.healthy is None:
        return ""
    low, high = entry.healthy
    if low == high:
        return f"{low:g}"
    if low is None:
        return f"at most {high:g}"
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    introduction = page.read_text(encoding="utf-8").partition(HEAD.partition(" meaning")[0])[0]
    page.write_text(introduction + table(), encoding="utf-8")
