"""Results of one arm over its finished seeds: accuracy, speed, and collapses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from covey.analysis.compare import statistics
from covey.analysis.compare.comparison import Comparison, Point, RunResult
from covey.analysis.compare.learning_curves import AXES
from covey.analysis.compare.statistics import Array
from covey.evaluation.intervals import Estimate

SHARES = (0.5, 1.0)
"""Accuracies whose time is reported, as shares of the way from the start to the highest accuracy
that every arm reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToAccuracy:
    """When an arm reaches an accuracy: medians over seeds, None if half of them do not."""

    accuracy: float
    reached: int
    """Number of finished seeds that reach it."""
    budget: float | None
    """In the unit of the comparison's budget."""
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run of an arm takes; None where the runs do not say."""

    seconds: float
    """Median over seeds of the time in training steps after the first, without evaluations."""
    cpu_seconds: float | None
    """Median over seeds of the CPU time of the process, evaluations included."""
    memory_gib: float | None
    """Largest peak memory over seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """A seed that ended far below an earlier accuracy, by more than chance."""

    seed: int
    before: float
    final: float
    kind: Literal["lost half of its best", "below its start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm over its finished seeds. Estimates are None without a finished seed."""

    arm: str
    seeds: int
    missing: tuple[str, ...]
    """One line for each planned run that did not finish."""
    initial: Estimate | None = None
    final: Estimate | None = None
    """Mean over seeds; the interval covers seeds and prompts."""
    improvement: Estimate | None = None
    """Final minus initial."""
    best: Estimate | None = None
    """Mean of each seed's highest accuracy. Biased upwards: the held-out prompts select it."""
    area: Estimate | None = None
    """Mean accuracy over the budget that all runs share; the interval is over seeds."""
    time_to_accuracy: tuple[TimeToAccuracy, ...] = ()
    collapsed: tuple[Collapse, ...] = ()
    cost: Cost | None = None


def arm_results(comparison: Comparison) -> tuple[ArmResult, ...]:
    """Return the result of every arm."""
    arms = comparison.finished_runs()
    budget = comparison.budget
    levels = _levels([runs for runs in arms.values() if runs])
    end = min((_axis(run, budget)[-1] for runs in arms.values() for run in runs), default=0.0)
    results = []
    for arm, runs in arms.items():
        missing = _missing(comparison, arm)
        if not runs:
            results.append(ArmResult(arm=arm, seeds=0, missing=missing))
            continue
        first, last = (_correct([run.points[at] for run in runs]) for at in (0, -1))
        best = _correct([max(run.points, key=lambda point: point.accuracy) for run in runs])
        areas = [statistics.area(_axis(run, budget), _accuracies(run), end) for run in runs]
        collapses = (_collapse(run) for run in runs)
        results.append(
            ArmResult(
                arm=arm,
                seeds=len(runs),
                missing=missing,
                initial=statistics.accuracy(first),
                final=statistics.accuracy(last),
                improvement=statistics.change(last - first),
                best=statistics.accuracy(best),
                area=statistics.over_seeds(areas),
                time_to_accuracy=tuple(_time_to(level, runs, budget) for level in levels),
                collapsed=tuple(each for each in collapses if each is not None),
                cost=_cost(runs),
            )
        )
    return tuple(results)


def _cost(runs: Sequence[RunResult]) -> Cost:
    cpu = [run.cpu_seconds for run in runs if run.cpu_seconds]
    memory = [run.memory_gib for run in runs if run.memory_gib]
    return Cost(
        seconds=float(np.median([run.points[-1].seconds for run in runs])),
        cpu_seconds=float(np.median(cpu)) if cpu else None,
        memory_gib=max(memory) if memory else None,
    )


def _missing(comparison: Comparison, arm: str) -> tuple[str, ...]:
    """Return a line for each planned run of an arm that did not finish."""
    by_seed = {run.seed: run for run in comparison.runs_of(arm)}
    lines = []
    for seed in sorted({*comparison.seeds, *by_seed}):
        run = by_seed.get(seed)
        if run is None:
            lines.append(f"{arm} seed {seed}: not run")
        elif run.state != "done":
            lines.append(f"{arm} seed {seed}: {run.state}{run.error and f', {run.error}'}")
        elif not run.points:
            lines.append(f"{arm} seed {seed}: done, but never evaluated")
    return tuple(lines)


def _correct(points: Sequence[Point]) -> Array:
    return np.array([list(point.correct.values()) for point in points], dtype=float)


def _accuracies(run: RunResult) -> list[float]:
    return [point.accuracy for point in run.points]


def _axis(run: RunResult, name: str) -> list[float]:
    return [AXES[name][1](point) for point in run.points]


def _levels(arms: Sequence[Sequence[RunResult]]) -> list[float]:
    """Return the accuracies whose time is reported.

    An arm reaches an accuracy if more than half of its seeds do, so that one failed seed does not
    decide.
    """
    if not arms:
        return []
    heights = [sorted((max(_accuracies(run)) for run in runs), reverse=True) for runs in arms]
    common = min(height[len(height) // 2] for height in heights)
    start = float(np.mean([run.points[0].accuracy for runs in arms for run in runs]))
    if common <= start:
        return []
    return [start + share * (common - start) for share in SHARES]


def _time_to(level: float, runs: Sequence[RunResult], budget: str) -> TimeToAccuracy:
    places = {
        name: [statistics.reached(_axis(run, name), _accuracies(run), level) for run in runs]
        for name in (budget, "tokens", "seconds")
    }

    def median(name: str) -> float | None:
        middle = float(np.median(places[name]))
        return middle if math.isfinite(middle) else None

    return TimeToAccuracy(
        accuracy=level,
        reached=sum(math.isfinite(place) for place in places[budget]),
        budget=median(budget),
        tokens=median("tokens"),
        seconds=median("seconds"),
    )


def _collapse(run: RunResult) -> Collapse | None:
    """Return how a run collapsed, if it did; docs/statistics.md has the definition.

    A run that lost half of its best accuracy has fallen apart; one below its start has unlearned.
    In both cases the fall must exceed chance on this number of prompts.
    """
    best = max(run.points, key=lambda point: point.accuracy)
    start, last = run.points[0], run.points[-1]
    final = _correct([last])[0]
    if 2 * last.accuracy < best.accuracy and statistics.fell(_correct([best])[0], final):
        kind: Literal["lost half of its best", "below its start"] = "lost half of its best"
        before = best.accuracy
    elif last.accuracy < start.accuracy and statistics.fell(_correct([start])[0], final):
        kind, before = "below its start", start.accuracy
    else:
        return None
    return Collapse(seed=run.seed, before=before, final=last.accuracy, kind=kind)
