"""Writes the HTML and Markdown reports of a run.

    report.html   one page that opens offline and runs no script
    report.md     the same for a comment or a wiki, with report.svg for its curves

A report depends only on the run, so two reports of the same run are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from markupsafe import Markup, escape

from covey._version import __version__
from covey.errors import RunError
from covey.lab.compare.report import (
    HEALTH,
    Example,
    choose_examples,
    trends,
)
from covey.lab.page import TextTable, Trend, fenced, render, security_policy, style_sheet
from covey.lab.ui.group_views import RolloutIndex
from covey.records.files import write_text
from covey.records.folder import RunFolder, settings_of
from covey.records.health import Finding, timeline
from covey.records.metric_registry import change_text, estimate_text, is_number, value_text
from covey.records.records import MOST_TEXT, Note, read_bytes

# The contents of the report.


PANELS = MappingProxyType(
    {
        "reward": HEALTH["reward"],
        "correct": ("objective/verifiable_correct_rate",),
        "loss": ("sft/loss",),
        **HEALTH,
    }
)
"""Maps each chart of the report to the metrics that the chart can show. If the run logged several
metrics of a chart, the chart shows the first of them.
"""
SAMPLES = 3
READ_SECONDS = 60.0
"""The time limit, in seconds, for reading the last step's rollouts."""
KINDS = MappingProxyType(
    {
        "arms differ": "Changed",
        "all correct": "Correct before and after",
        "all incorrect": "Incorrect before and after",
    }
)
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All contents of a run's report."""

    name: str
    headline: str
    about: str
    trends: Mapping[str, Trend]
    evaluations: TextTable
    examples: Sequence[Example]
    """Held-out prompts with their greedy completions before and after training."""
    sampled_step: int | None
    samples: Sequence[Mapping[str, Any]]
    """The last step's rollouts with the highest rewards, and then with the lowest rewards."""
    findings: Sequence[Finding]
    command: str
    environment: str
    config: str
    notes: Sequence[str]
    """Notes about files in the run folder that could not be read."""


def run_report(run: RunFolder) -> RunReport:
    notes: list[str] = []
    steps, evaluations = run.steps(notes.append), run.evaluations(notes.append)
    environment = run.environment(notes.append)
    sampled, samples = _samples(run, notes.append)
    try:
        config = read_bytes(run.config_file, MOST_TEXT).decode("utf-8", "replace")
    except RunError as error:
        config = "not recorded"
        notes.append(str(error))
    return RunReport(
        name=run.path.resolve().name,
        headline=headline(steps, evaluations),
        about=_about(run, steps, environment),
        trends=trends("", PANELS, [steps]),
        evaluations=evaluation_table(evaluations),
        examples=_examples(run, evaluations, notes.append),
        sampled_step=sampled,
        samples=samples,
        findings=timeline(steps, settings_of(run)),
        command=" ".join(environment.get("command", [])) or "not recorded",
        environment=json.dumps({k: v for k, v in environment.items() if k != "config"}, indent=2),
        config=config,
        notes=notes,
    )


def headline(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    if len(evaluations) > 1:
        name, what = decided_by(evaluations)
        first, last = evaluations[0][name], evaluations[-1][name]
        clear = last["low"] > first["high"] or last["high"] < first["low"]
        change = change_text(name, last["value"] - first["value"])
        start, end = evaluations[0]["step"], evaluations[-1]["step"]
        when = f"from step {start} to step {end}" if start else f"in {end} steps"
        return (
            f"{what} went from {value_text(name, first['value'])} to "
            f"{value_text(name, last['value'])} {when} "
            f"({change}{'' if clear else ', within noise'})"
        )
    rewards = [row["objective/scores"] for row in steps if is_number(row.get("objective/scores"))]
    if rewards:
        return f"Mean reward went from {rewards[0]:.3g} to {rewards[-1]:.3g} in {len(steps)} steps"
    return f"{len(steps)} steps, and no evaluation"


def decided_by(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    correct = any(row["greedy"]["value"] for row in evaluations)
    if correct or not all("reward" in row for row in evaluations):
        return "greedy", "Held-out accuracy"
    return "reward", "Held-out mean reward"


def _about(
    run: RunFolder, steps: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
) -> str:
    settings = settings_of(run)
    named = (("objective", "name"), ("task", "name"), ("model", "path"))
    facts = [
        *(str(settings.get(section, {}).get(key) or "") for section, key in named),
        f"{len(steps)} steps",
        f"seed {environment['seed']}" if "seed" in environment else "",
        str(environment.get("device") or ""),
        f"started {environment['started']}" if "started" in environment else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> TextTable:
    return TextTable(
        title="Accuracy by step",
        head=["step", "greedy", "reward", "best constant", "distinct answers", "prompts"],
        rows=[
            [
                str(row["step"]),
                estimate_text("greedy", row["greedy"]),
                estimate_text("reward", row["reward"]) if "reward" in row else "-",
                "-" if row.get("best_constant") is None else f"{row['best_constant']:.1%}",
                "-" if row.get("distinct_answers") is None else str(row["distinct_answers"]),
                str(row["prompts"]),
            ]
            for row in evaluations
        ],
        note="Means with 95 % intervals over prompts. Best constant: accuracy of the one answer "
        "that is right most often.",
    )


def _examples(
    run: RunFolder, evaluations: Sequence[Mapping[str, Any]], note: Note
) -> tuple[Example, ...]:
    if len(evaluations) < 2:
        return ()
    times = {BEFORE: evaluations[0]["step"], AFTER: evaluations[-1]["step"]}
    rows = {
        name: {row["prompt_id"]: row for row in run.items(step, note)}
        for name, step in times.items()
    }
    return choose_examples(rows) if all(rows.values()) else ()


def _samples(run: RunFolder, note: Note) -> tuple[int | None, list[Mapping[str, Any]]]:
    kept = run.numbered("rollouts", ".jsonl")
    if not kept:
        return None, []
    step, path = kept[-1]
    index = RolloutIndex(path)
    try:
        index.update(READ_SECONDS)
    except RunError as error:
        note(str(error))
    for problem in index.notes:
        note(problem)
    if not index.done:
        note(f"{path} is large, so only its first {index.share:.0%} was read")
    rows: list[Mapping[str, Any]] = []
    scored = sorted(
        (e for e in index.entries if e.reward is not None), key=lambda e: -(e.reward or 0.0)
    )
    distinct = list({entry.text: entry for entry in reversed(scored)}.values())[::-1]
    lowest = distinct[max(SAMPLES, len(distinct) - SAMPLES) :]
    chosen = [("highest", e) for e in distinct[:SAMPLES]] + [("lowest", e) for e in lowest]
    for kind, entry in chosen:
        try:
            rows.append({**index.row(entry.line), "kind": kind})
        except RunError as error:
            note(str(error))
    return step, rows


LONGEST = 3000


def write_run_report(run: RunFolder, folder: Path) -> list[Path]:
    report = run_report(run)
    files = {"report.html": html(report), "report.md": markdown(report)}
    if report.trends:
        files["report.svg"] = sheet(list(report.trends.items()))
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def html(report: RunReport) -> str:
    style = style_sheet() + STYLE
    return _rendered("run.html", report, policy=security_policy([]), style=style, svg=svg)


def markdown(report: RunReport) -> str:
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
