"""Collects the contents of a comparison's report for its HTML, Markdown and JSON files.

The conclusion, the learning curves and the numbers of solved prompts come from evaluations. The
example completions and training metrics come from run folders. Without run folders, the report has
no example completions and no training metrics. The modules `report_tables.py` and
`report_files.py` write the tables and the files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from covey.lab.compare.comparison import Comparison, RunResult
from covey.lab.compare.conclusion import Conclusion, conclude
from covey.lab.compare.learning_curves import Curve, learning_curve
from covey.records.folder import RunFolder

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
class Trend:
    """A training metric at each step, averaged over the runs of an arm."""

    metric: str
    arm: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


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


# Agreement of arms: how many held-out prompts all arms, only one arm or no arm solves.

MOST_DIFFERENT = 12
"""The length of the report's list of the prompts on which arms differ most."""

Runs = Mapping[str, Sequence[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPrompt:
    """A held-out prompt, and for each arm the number of finished runs that solve the prompt."""

    id: str
    solved: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The numbers of held-out prompts that all arms, some arms or no arm solves.

    An arm solves a prompt if more than half of the arm's finished runs solve the prompt.
    """

    runs: Mapping[str, int]
    """Maps each arm to its number of finished runs. Arms without a finished run are left out."""
    num_prompts: int
    solved_by_all: int
    solved_by_none: int
    solved_by_some: int
    """The number of prompts that more than one arm, but not every arm, solves."""
    solved_only_by: Mapping[str, int]
    disagreement_between_seeds: float | None
    """The fraction of prompts that exactly one of two runs solves, averaged over all pairs of runs
    of the same arm. `disagreement_between_seeds` is None if no arm has two finished runs.
    """
    disagreement_between_arms: float | None
    """The fraction of prompts that exactly one of two runs solves, averaged over all pairs of runs
    with the same seed and different arms.
    """
    most_different: tuple[SolvedPrompt, ...]


def prompt_agreement(comparison: Comparison) -> Agreement | None:
    """Count the prompts that each arm solves in its last evaluation.

    Return None if no run has finished.
    """
    runs = {arm: mine for arm, mine in comparison.finished_runs().items() if mine}
    if not runs:
        return None
    correct = {arm: [run.points[-1].correct for run in mine] for arm, mine in runs.items()}
    prompts = [
        SolvedPrompt(id=name, solved={arm: sum(c[name] for c in correct[arm]) for arm in runs})
        for name in next(iter(correct.values()))[0]
    ]
    solvers = [{arm for arm, n in p.solved.items() if 2 * n > len(runs[arm])} for p in prompts]
    alone = [next(iter(arms)) for arms in solvers if len(arms) == 1 < len(runs)]
    by_all = sum(len(arms) == len(runs) for arms in solvers)
    by_none = sum(not arms for arms in solvers)
    return Agreement(
        runs={arm: len(mine) for arm, mine in runs.items()},
        num_prompts=len(prompts),
        solved_by_all=by_all,
        solved_by_none=by_none,
        solved_by_some=len(prompts) - by_all - by_none - len(alone),
        solved_only_by={arm: alone.count(arm) for arm in runs} if len(runs) > 1 else {},
        disagreement_between_seeds=_disagreement(
            pair for mine in runs.values() for pair in itertools.combinations(mine, 2)
        ),
        disagreement_between_arms=_disagreement(
            (a, b)
            for one, other in itertools.combinations(runs.values(), 2)
            for a, b in itertools.product(one, other)
            if a.seed == b.seed
        ),
        most_different=_most_different(prompts, runs),
    )


def _disagreement(pairs: Iterable[tuple[RunResult, RunResult]]) -> float | None:
    shares = []
    for one, other in pairs:
        a, b = one.points[-1].correct, other.points[-1].correct
        shares.append(sum(a[name] != b[name] for name in a) / len(a))
    return sum(shares) / len(shares) if shares else None


def _most_different(prompts: Sequence[SolvedPrompt], runs: Runs) -> tuple[SolvedPrompt, ...]:
    """Return the prompts whose success rates differ most between the arms."""

    def gap(prompt: SolvedPrompt) -> float:
        shares = [prompt.solved[arm] / len(mine) for arm, mine in runs.items()]
        return max(shares) - min(shares)

    ordered = sorted(prompts, key=gap, reverse=True)  # stable: ties keep the order of the task
    return tuple(prompt for prompt in ordered[:MOST_DIFFERENT] if gap(prompt) > 0)
