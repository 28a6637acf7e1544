"""The report of a comparison: a page, Markdown for a comment, and JSON for programs.

    report.html   one file that opens offline
    report.md     the same tables
    report.json   everything, for programs; docs/compare-report.md says what each field is

Nothing here depends on when a report is written: the same runs give the same report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from covey._version import __version__
from covey.analysis.compare.facts import Facts, facts_of
from covey.analysis.compare.markup import finite
from covey.analysis.compare.outcome import Comparison, Outcome, Point
from covey.analysis.compare.report_html import page
from covey.analysis.compare.report_text import markdown, terminal_table
from covey.run.files import write_text

__all__ = ["SCHEMA", "report_data", "terminal_table", "write_reports"]

SCHEMA = 1
"""Of report.json. It grows when a field is renamed, removed or changes its meaning."""


def write_reports(folder: Path, comparison: Comparison) -> None:
    """Write report.html, report.md and report.json into the comparison's folder."""
    facts = facts_of(folder, comparison)
    write_text(folder / "report.html", page(facts))
    write_text(folder / "report.md", markdown(facts))
    write_text(folder / "report.json", _json(report_data(facts)))


def _json(data: Mapping[str, Any]) -> str:
    """Write a line for each field: tools read it, and a person finds the field."""
    dump = partial(json.dumps, allow_nan=False, default=str)
    lines = [f"{dump(name)}: {dump(finite(value))}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def report_data(facts: Facts) -> dict[str, Any]:
    """Return all that is known, as plain data."""
    comparison, evidence = facts.comparison, facts.evidence
    prompts = _prompts(comparison)
    return {
        "schema": SCHEMA,
        "covey": __version__,
        "name": comparison.name,
        "command": comparison.command,
        "budget": {"kind": comparison.budget, "amount": comparison.amount},
        "seeds": list(comparison.seeds),
        "arms": [{"name": a.name, "differences": dict(a.differences)} for a in comparison.arms],
        "verdict": facts.verdict.row(),
        "prompts": [_prompt(name, evidence.texts) for name in prompts],
        "runs": [_run(run) for arm in comparison.arms for run in comparison.of(arm.name)],
        "curves": [_without(each.row(), "lines") for each in facts.curves],
        "agreement": facts.agreement.row() if facts.agreement is not None else None,
        "answers": {
            "seed": evidence.seed,
            "problems": [each.row() for each in evidence.side_by_side],
        },
        "health": {name: [t.row() for t in trends] for name, trends in evidence.health.items()},
        "findings": [dict(finding) for finding in comparison.findings],
        "environment": dict(comparison.environment),
        "config_toml": comparison.config_toml,
    }


def _prompts(comparison: Comparison) -> list[str]:
    return next((list(run.points[0].right) for run in comparison.outcomes if run.points), [])


def _prompt(name: str, texts: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    prompt, expected = texts.get(name, (None, None))
    return {"id": name, "prompt": prompt, "expected": expected}


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def _run(run: Outcome) -> dict[str, Any]:
    return {
        "arm": run.arm,
        "seed": run.seed,
        "state": run.state,
        "error": run.error,
        "folder": run.folder,
        "weights": run.weights,
        "points": [_point(point) for point in run.points],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "step": point.step,
        "tokens": point.tokens,
        "updates": point.updates,
        "seconds": point.seconds,
        "accuracy": point.accuracy,
        # One character a prompt: a list of numbers would be a line each.
        "right": "".join("01"[right] for right in point.right.values()),
    }
