"""Collects the contents of a comparison's report for its HTML, Markdown and JSON files.

The conclusion, the learning curves and the numbers of solved prompts come from evaluations. The
example completions and training metrics come from run folders. Without run folders, the report has
no example completions and no training metrics. The modules `report_tables.py` and
`report_files.py` write the tables and the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from covey.lab.compare.arm_results import Agreement, Curve, learning_curve, prompt_agreement
from covey.lab.compare.comparison import Comparison
from covey.lab.compare.conclusion import Conclusion, conclude
from covey.lab.page.render import Trend
from covey.records.folder import RunFolder

HEALTH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reward": ("objective/scores",),
        "entropy": ("policy/entropy_avg",),
        "clipped share": ("policy/clipfrac_avg",),
        # The KL from the reference if there is one, and otherwise from the sampling policy.
        "KL": ("objective/kl_avg", "policy/approxkl_avg"),
        "completion length": ("rollout/lengths",),
        "gradient norm": ("optim/grad_norm",),
    }
)
"""Maps each training-health chart of the report to the names of its metrics in steps.jsonl.

If a chart has several metrics, the chart shows the first metric that the run logged. Each metric is
defined in docs/metrics.md.
"""
HEALTH_POINTS = 200
"""The largest number of points in a chart. In a run with more than HEALTH_POINTS steps, each point
is the mean of several steps."""
EXAMPLES = MappingProxyType({"arms differ": 3, "all correct": 1, "all incorrect": 2})
"""The number of example prompts of each kind in the report."""

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
    """Maps each arm to its completion, as a dict of `text`, `correct`, `tokens` and `finish`."""


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
    """Maps each prompt id to the prompt's text and its target; empty if no run saved
    completions."""
    example_seed: int | None
    """The seed of the runs whose completions are shown as examples."""
    examples: tuple[Example, ...]
    health: Mapping[str, tuple[Trend, ...]]
    """Maps each chart of the report to one curve for each arm."""


def report_contents(folder: Path, comparison: Comparison) -> ReportContents:
    """Collect the contents of a report. `folder` is the comparison's folder."""
    seed = _common_seed(comparison)
    rows = {}
    for arm in comparison.arms:
        for run in comparison.runs_of(arm.name):
            if run.finished and run.seed == seed:
                items = RunFolder(folder / run.folder).items(run.points[-1].step, note=_ignore)
                rows[arm.name] = {row["prompt_id"]: row for row in items}
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
        health=_health(folder, comparison),
    )


def _common_seed(comparison: Comparison) -> int | None:
    """Return the seed with the most finished runs; on a tie, the first such seed."""
    counts = {
        seed: sum(run.finished for run in comparison.runs if run.seed == seed)
        for seed in comparison.seeds
    }
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


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


def _health(folder: Path, comparison: Comparison) -> dict[str, tuple[Trend, ...]]:
    found: dict[str, list[Trend]] = {}
    for arm in comparison.arms:
        runs = comparison.runs_of(arm.name)
        logs = [RunFolder(folder / run.folder).steps(_ignore) for run in runs]
        for panel, drawn in trends(arm.name, HEALTH, logs).items():
            found.setdefault(panel, []).append(drawn)
    return {panel: tuple(found[panel]) for panel in HEALTH if panel in found}


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
    """Return the mean of a metric over an arm's runs, at each step that has the metric."""
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
