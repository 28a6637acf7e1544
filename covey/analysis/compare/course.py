"""One arm at a time: where it began and ended, how fast it came there, and whether it held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from covey.analysis.compare import statistics
from covey.analysis.compare.curves import AXES
from covey.analysis.compare.judged import ArmVerdict, Collapse, Reach
from covey.analysis.compare.outcome import Comparison, Outcome, Point
from covey.analysis.compare.statistics import Array

SHARES_OF_THE_WAY = (0.5, 1.0)
"""From the start to the highest accuracy that every arm reaches: how fast arms come there."""


def arm_verdicts(
    comparison: Comparison,
    runs: Mapping[str, Mapping[int, Outcome]],
    missing: Mapping[str, tuple[str, ...]],
) -> tuple[ArmVerdict, ...]:
    """Judge every arm by its finished runs."""
    arms = {arm: list(by_seed.values()) for arm, by_seed in runs.items()}
    levels = _levels([mine for mine in arms.values() if mine])
    place = AXES[comparison.budget][1]
    ends = [place(run.points[-1]) for mine in arms.values() for run in mine]
    return tuple(
        _arm_verdict(
            arm, mine, missing[arm], levels=levels, budget=comparison.budget, end=min(ends)
        )
        if mine
        else _nothing(arm, missing[arm])
        for arm, mine in arms.items()
    )


def _nothing(arm: str, missing: tuple[str, ...]) -> ArmVerdict:
    return ArmVerdict(
        arm=arm,
        seeds=0,
        missing=missing,
        initial=None,
        final=None,
        improvement=None,
        best=None,
        area=None,
        reach=(),
        collapsed=(),
    )


def _arm_verdict(
    arm: str,
    runs: Sequence[Outcome],
    missing: tuple[str, ...],
    *,
    levels: Sequence[float],
    budget: str,
    end: float,
) -> ArmVerdict:
    first, last = (_right([run.points[at] for run in runs]) for at in (0, -1))
    best = _right([max(run.points, key=lambda point: point.accuracy) for run in runs])
    areas = [statistics.area(_axis(run, budget), _accuracies(run), end) for run in runs]
    collapses = (_collapse(run) for run in runs)
    return ArmVerdict(
        arm=arm,
        seeds=len(runs),
        missing=missing,
        initial=statistics.accuracy(first),
        final=statistics.accuracy(last),
        improvement=statistics.change(last - first),
        best=statistics.accuracy(best),
        area=statistics.over_seeds(areas),
        reach=tuple(_reach(runs, level, budget) for level in levels),
        collapsed=tuple(collapse for collapse in collapses if collapse is not None),
    )


def _right(points: Sequence[Point]) -> Array:
    return np.array([list(point.right.values()) for point in points], dtype=float)


def _accuracies(run: Outcome) -> list[float]:
    return [point.accuracy for point in run.points]


def _axis(run: Outcome, name: str) -> list[float]:
    return [AXES[name][1](point) for point in run.points]


def _levels(arms: Sequence[Sequence[Outcome]]) -> list[float]:
    """Return the accuracies whose time is taken: on the way to what all arms reach.

    An arm reaches what more than half of its seeds do; one that fails says little of the others.
    """
    if not arms:
        return []
    heights = [sorted((max(_accuracies(run)) for run in runs), reverse=True) for runs in arms]
    common = min(height[len(height) // 2] for height in heights)
    start = float(np.mean([run.points[0].accuracy for runs in arms for run in runs]))
    if common <= start:
        return []
    return [start + share * (common - start) for share in SHARES_OF_THE_WAY]


def _reach(runs: Sequence[Outcome], level: float, budget: str) -> Reach:
    places = {
        name: [statistics.reached(_axis(run, name), _accuracies(run), level) for run in runs]
        for name in (budget, "tokens", "seconds")
    }

    def median(name: str) -> float | None:
        middle = float(np.median(places[name]))
        return middle if math.isfinite(middle) else None

    return Reach(
        accuracy=level,
        reached=sum(math.isfinite(place) for place in places[budget]),
        budget=median(budget),
        tokens=median("tokens"),
        seconds=median("seconds"),
    )


def _collapse(run: Outcome) -> Collapse | None:
    """Return how a run collapsed, if it did: docs/statistics.md has the definition.

    Half of the best is lost only where a policy falls apart; below its start it has unlearned. The
    fall must also be more than chance makes of so many problems.
    """
    best = max(run.points, key=lambda point: point.accuracy)
    start, last = run.points[0], run.points[-1]
    final = _right([last])[0]
    if 2 * last.accuracy < best.accuracy and statistics.fell(_right([best])[0], final):
        kind: Literal["half of its best lost", "below its start"] = "half of its best lost"
        before = best.accuracy
    elif last.accuracy < start.accuracy and statistics.fell(_right([start])[0], final):
        kind, before = "below its start", start.accuracy
    else:
        return None
    return Collapse(seed=run.seed, before=before, final=last.accuracy, kind=kind)
