"""Learning curves: held-out accuracy during training, for each run and averaged for each arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from covey.lab.compare.comparison import Comparison, Point, RunResult

AXES: Mapping[str, tuple[str, Callable[[Point], float]]] = MappingProxyType(
    {
        "steps": ("training steps", lambda point: point.step),
        "tokens": ("tokens sampled for training", lambda point: point.tokens),
        "updates": ("optimizer steps", lambda point: point.updates),
        "seconds": ("seconds of training", lambda point: point.seconds),
    }
)
"""Maps each x axis to its label, and to a function that returns the x value of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The learning curve of one run: the x value and the accuracy of each evaluation."""

    seed: int
    state: str
    x: Mapping[str, tuple[float, ...]]
    """Maps the name of each x axis to the x values of the evaluations."""
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The learning curves of an arm's runs, and the mean of its finished runs."""

    arm: str
    lines: tuple[Line, ...]
    x: Mapping[str, tuple[float, ...]]
    """Maps the name of each x axis to the x values of the mean curve, averaged over seeds."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """The lowest accuracy of any finished run. The range from `low` to `high` is not a confidence
    interval."""
    high: tuple[float, ...]
    seeds: Mapping[int, tuple[float | None, ...]]
    """Maps each seed to its accuracies at the steps of the mean curve. An accuracy is None if the
    run was not evaluated at the step."""


def learning_curve(comparison: Comparison, arm: str) -> Curve:
    """Return the learning curves of an arm's runs, and the mean of its finished runs."""
    runs = [run for run in comparison.runs_of(arm) if run.points]
    columns = _columns([run for run in runs if run.finished])
    values = [[point.value for point in column] for column in columns]
    return Curve(
        arm=arm,
        lines=tuple(
            Line(
                seed=run.seed,
                state=run.state,
                x={axis: tuple(map(of, run.points)) for axis, (_, of) in AXES.items()},
                accuracy=tuple(point.value for point in run.points),
            )
            for run in runs
        ),
        x={
            axis: tuple(_mean([of(point) for point in column]) for column in columns)
            for axis, (_, of) in AXES.items()
        },
        mean=tuple(_mean(column) for column in values),
        low=tuple(min(column) for column in values),
        high=tuple(max(column) for column in values),
        seeds={run.seed: _at(run, columns) for run in runs if columns},
    )


def _at(run: RunResult, columns: Sequence[Sequence[Point]]) -> tuple[float | None, ...]:
    """Return a run's accuracy at each step of the mean curve, with the final accuracy last."""
    by_step = {point.step: point.value for point in run.points}
    earlier = (by_step.get(column[0].step) for column in columns[:-1])
    return (*earlier, run.points[-1].value if run.finished else None)


def _columns(runs: Sequence[RunResult]) -> list[list[Point]]:
    """Return, for each step of the mean curve, the evaluations that the curve averages.

    The mean curve has the steps at which all runs were evaluated. The last value of the mean curve
    averages the last evaluation of each run, because runs with a token budget end at different
    steps.
    """
    if not runs:
        return []
    by_step = [{point.step: point for point in run.points} for run in runs]
    shared = set(by_step[0]).intersection(*by_step[1:])
    ends = [run.points[-1] for run in runs]
    earlier = sorted(step for step in shared if all(step < end.step for end in ends))
    return [*([run[step] for run in by_step] for step in earlier), ends]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
