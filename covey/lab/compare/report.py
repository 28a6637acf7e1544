"""Writes the report files of a comparison.

    report.html   one page that opens offline, without other files
    report.md     the same tables, for a comment
    report.json   everything, for programs; docs/compare-report.md describes each field

A report depends only on the runs, so two reports of the same runs are equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey._version import __version__
from covey.escape import printable
from covey.lab.compare import tables
from covey.lab.compare.arm_results import AXES, Agreement, Curve, learning_curve, prompt_agreement
from covey.lab.compare.comparison import Comparison, RunResult, load_comparison
from covey.lab.compare.conclusion import Conclusion, conclude, count
from covey.lab.page import (
    Trend,
    embedded_json,
    fenced,
    page_file,
    render,
    script,
    security_policy,
    style_sheet,
)
from covey.records.files import finite, write_text
from covey.records.folder import RunFolder
from covey.screen import Screen

# The contents of a report.


HEALTH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reward": ("objective/scores",),
        "entropy": ("policy/entropy_avg",),
        "clipped share": ("policy/clipfrac_avg",),
        # The KL from the reference if there is one, and otherwise from the sampling policy.
        "KL": ("objective/kl_avg", "policy/approxkl_avg"),
        "completion length": ("val/sequence_lengths",),
        "gradient norm": ("optim/grad_norm",),
    }
)
"""Maps each training-health chart of the report to the names of its metrics in steps.jsonl.

If a chart has several metrics, the chart shows the first metric that the run logged. Each metric is
defined in docs/metrics.md.
"""
HEALTH_POINTS = 200
"""The largest number of points in a chart."""
EXAMPLES = MappingProxyType({"arms differ": 3, "all correct": 1, "all incorrect": 2})

COMPLETION = MappingProxyType(
    {"text": "completion", "correct": "success", "tokens": "tokens", "finish": "finish"}
)
"""Maps each field of an example completion to the name of that field in the evaluation file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A held-out prompt with each arm's greedy completion at the end of training."""

    kind: str
    prompt_id: str
    prompt: str
    target: str
    completions: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContents:
    """All contents of a comparison's report."""

    comparison: Comparison
    conclusion: Conclusion
    curves: tuple[Curve, ...]
    agreement: Agreement | None
    """The numbers of prompts that all arms, some arms or no arm solves. `agreement` is None if no
    run has finished, or if arms are compared by reward."""
    texts: Mapping[str, tuple[str, str]]
    example_seed: int | None
    examples: tuple[Example, ...]
    health: Mapping[str, tuple[Trend, ...]]


def report_contents(folder: Path, comparison: Comparison) -> ReportContents:
    # The seed with the most finished runs; on a tie, the first such seed.
    counts = {
        seed: sum(run.finished for run in comparison.runs if run.seed == seed)
        for seed in comparison.seeds
    }
    seed = max(counts, key=counts.__getitem__) if any(counts.values()) else None
    rows = {}
    health: dict[str, list[Trend]] = {panel: [] for panel in HEALTH}
    for arm in comparison.arms:
        for run in comparison.runs_of(arm.name):
            if run.finished and run.seed == seed:
                items = RunFolder(folder / run.folder).items(run.points[-1].step, note=_ignore)
                rows[arm.name] = {row["prompt_id"]: row for row in items}
        logs = [RunFolder(folder / r.folder).steps(_ignore) for r in comparison.runs_of(arm.name)]
        for panel, drawn in trends(arm.name, HEALTH, logs).items():
            health[panel].append(drawn)
    rows = {arm: items for arm, items in rows.items() if items}
    by_reward = any(point.by == "reward" for run in comparison.runs for point in run.points)
    return ReportContents(
        comparison=comparison,
        conclusion=conclude(comparison),
        curves=tuple(learning_curve(comparison, arm.name) for arm in comparison.arms),
        agreement=None if by_reward else prompt_agreement(comparison),
        texts={i: (r["prompt"], r["target"]) for a in rows.values() for i, r in a.items()},
        example_seed=seed if rows else None,
        examples=choose_examples(rows),
        health={panel: tuple(drawn) for panel, drawn in health.items() if drawn},
    )


def _ignore(text: str) -> None:
    """Ignore a note about a damaged line, because loading the comparison already printed the
    note."""


def choose_examples(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[Example, ...]:
    """Choose example prompts of three kinds: solved by all arms, by some arms, or by no arm.

    `rows[arm][prompt_id]` is the arm's completion of the prompt in one seed's last evaluation.
    """
    if not rows:
        return ()
    left = dict(EXAMPLES)
    chosen = []
    for prompt_id, first in next(iter(rows.values())).items():
        mine = {arm: items[prompt_id] for arm, items in rows.items() if prompt_id in items}
        correct = [bool(row["success"]) for row in mine.values()]
        kind = "all correct" if all(correct) else "arms differ" if any(correct) else "all incorrect"
        if left[kind] > 0:
            left[kind] -= 1
            chosen.append(
                Example(
                    kind=kind,
                    prompt_id=prompt_id,
                    prompt=first["prompt"],
                    target=first["target"],
                    completions={
                        arm: {name: row[key] for name, key in COMPLETION.items()}
                        for arm, row in mine.items()
                    },
                )
            )
    order = list(EXAMPLES)
    return tuple(sorted(chosen, key=lambda example: order.index(example.kind)))


def trends(
    arm: str,
    panels: Mapping[str, Sequence[str]],
    logs: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Trend]:
    """Map each chart to the curve of a metric, which is the chart's first metric that the runs
    logged."""
    found = {}
    for panel, metrics in panels.items():
        drawn = (trend(arm, metric, logs) for metric in metrics)
        first = next((each for each in drawn if each.steps), None)
        if first is not None:
            found[panel] = first
    return found


def trend(arm: str, metric: str, logs: Iterable[Sequence[Mapping[str, Any]]]) -> Trend:
    values: dict[int, list[float]] = {}
    for log in logs:
        for row in log:
            value = row.get(metric)
            if value is not None and math.isfinite(value):
                values.setdefault(row["step"], []).append(value)
    means = [(step, sum(found) / len(found)) for step, found in sorted(values.items())]
    width = max(1, math.ceil(len(means) / HEALTH_POINTS))
    intervals = [means[start : start + width] for start in range(0, len(means), width)]
    return Trend(
        metric=metric,
        arm=arm,
        steps=tuple(sum(step for step, _ in each) / len(each) for each in intervals),
        values=tuple(sum(value for _, value in each) / len(each) for each in intervals),
    )


SCHEMA = 4
"""The format version of report.json, which increases when a field is renamed, removed or
redefined."""
COLOURS = 8
"""The number of arm colors in the style sheet; further arms reuse the colors with dashed lines."""
LONGEST_COMPLETION = 3000
MISSING = "Charts are left out: they need plotly, from pip install 'covey[report]'."


def write_report(folder: Path, console: Screen) -> None:
    """Write the report files of a comparison. Print the report and the errors of failed runs."""
    comparison = load_comparison(folder)
    console.print(terminal_report(comparison, write_reports(folder, comparison)))
    for run in comparison.runs:
        if run.state == "failed":
            console.print(f"failed: {run.arm} seed {run.seed}: {run.error}")
    console.print(f"report   {folder / 'report.html'}")


def write_reports(folder: Path, comparison: Comparison) -> Conclusion:
    """Write the report files of a comparison, and return its conclusion."""
    contents = report_contents(folder, comparison)
    write_text(folder / "report.html", page(contents))
    write_text(folder / "report.md", markdown(contents))
    dump = partial(json.dumps, allow_nan=False, default=str)
    # One line for each top-level field, so that a field is easy to find.
    fields = [f"{dump(k)}: {dump(finite(v))}" for k, v in report_data(contents).items()]
    write_text(folder / "report.json", "{\n" + ",\n".join(fields) + "\n}\n")
    return contents.conclusion


def report_data(contents: ReportContents) -> dict[str, Any]:
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
    numbers = ("step", "tokens", "updates", "seconds", "accuracy")
    return {name: getattr(run, name) for name in names} | {
        "evaluations": [
            {name: getattr(point, name) for name in numbers}
            # One character per prompt keeps the file small.
            | {"correct": "".join("01"[each] for each in point.correct.values())}
            | ({} if point.by == "success" else {"reward": point.value})
            for point in run.points
        ]
    }


def terminal_report(comparison: Comparison, found: Conclusion) -> RenderableType:
    lines = [
        _text(found.headline, style="bold"),
        *(_text(f"! {text}", style="yellow") for text in found.cautions),
        *(_text(f"- {text}") for text in tables.pair_summaries(found)),
    ]
    lines += [
        _text(f"{tables.finding_title(row)}: {row.get('remedy', '')}", style="dim")
        for row in comparison.findings
    ]
    shown = []
    for made in (tables.result_table(found), tables.cost_table(found)):
        if made.rows:
            table = Table(title=_text(made.title), caption=_text(made.note))
            for number, heading in enumerate(made.head):
                table.add_column(_text(heading), justify="right" if number else "left")
            for row in made.rows:
                table.add_row(*map(_text, row))
            shown.append(table)
    return Group(*lines[:1], *shown, *lines[1:])


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


# The report as HTML and as Markdown, from the templates in covey/lab/page.


def page(contents: ReportContents) -> str:
    comparison = contents.comparison
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        scripts = []
    else:
        scripts = [str(get_plotlyjs()), page_file("comparison.js")]
    chart_data = {  # what comparison.js draws
        "arms": [arm.name for arm in comparison.arms],
        "by": comparison.by,
        "axes": {name: label for name, (label, _) in AXES.items()},
        "curves": [asdict(curve) for curve in contents.curves],
        "health": {panel: [asdict(t) for t in trends] for panel, trends in contents.health.items()},
    }
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
