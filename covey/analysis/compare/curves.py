"""Accuracy over the course of training, arm by arm, as what a chart draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.analysis.compare.outcome import Comparison, Outcome, Point

AXES: Mapping[str, tuple[str, Callable[[Point], float]]] = MappingProxyType(
    {
        "steps": ("training steps", lambda point: point.step),
        "tokens": ("tokens sampled for training", lambda point: point.tokens),
        "updates": ("optimizer steps", lambda point: point.updates),
        "seconds": ("seconds of training", lambda point: point.seconds),
    }
)
"""What a learning curve may be drawn over: name -> its label, and how a point has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One run's evaluations."""

    seed: int
    state: str
    x: Mapping[str, tuple[float, ...]]
    """By axis."""
    accuracy: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        x = {axis: list(values) for axis, values in self.x.items()}
        return {"seed": self.seed, "state": self.state, "x": x, "accuracy": list(self.accuracy)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """An arm's runs, and their mean where all of its finished runs were evaluated."""

    arm: str
    lines: tuple[Line, ...]
    x: Mapping[str, tuple[float, ...]]
    """Of the mean, by axis: seeds take different tokens and seconds, so this is a mean too."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """The lowest of the finished runs: what was seen, not an interval."""
    high: tuple[float, ...]
    seeds: Mapping[int, tuple[float | None, ...]]
    """Of every run, where the mean is taken; None where it was not evaluated, or did not end."""

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "arm": self.arm,
            "lines": [line.row() for line in self.lines],
            "x": {axis: list(values) for axis, values in self.x.items()},
            **{name: list(getattr(self, name)) for name in ("mean", "low", "high")},
        }


def curve(comparison: Comparison, arm: str) -> Curve:
    """Return the learning curve of an arm. Runs that did not finish have lines, but no mean."""
    runs = [run for run in comparison.of(arm) if run.points]
    finished = [run for run in runs if run.state == "done"]
    columns = _columns(finished)
    values = [[point.accuracy for point in column] for column in columns]
    return Curve(
        arm=arm,
        lines=tuple(_line(run) for run in runs),
        x={
            axis: tuple(_mean([of(point) for point in column]) for column in columns)
            for axis, (_, of) in AXES.items()
        },
        mean=tuple(_mean(column) for column in values),
        low=tuple(min(column) for column in values),
        high=tuple(max(column) for column in values),
        seeds={run.seed: _at(run, columns) for run in runs if columns},
    )


def _at(run: Outcome, columns: Sequence[Sequence[Point]]) -> tuple[float | None, ...]:
    """Return the accuracies of a run, column by column; the last of them is its end."""
    by_step = {point.step: point.accuracy for point in run.points}
    earlier = (by_step.get(column[0].step) for column in columns[:-1])
    return (*earlier, run.points[-1].accuracy if run.state == "done" else None)


def _columns(runs: Sequence[Outcome]) -> list[list[Point]]:
    """Return the points that belong together: those of the same step, and the last of each run.

    Runs with a budget of tokens end at different steps; their ends are still the same moment.
    """
    if not runs:
        return []
    by_step = [{point.step: point for point in run.points} for run in runs]
    shared = set(by_step[0]).intersection(*by_step[1:])
    ends = [run.points[-1] for run in runs]
    earlier = sorted(step for step in shared if all(step < end.step for end in ends))
    return [*([run[step] for run in by_step] for step in earlier), ends]


def _line(run: Outcome) -> Line:
    return Line(
        seed=run.seed,
        state=run.state,
        x={axis: tuple(of(point) for point in run.points) for axis, (_, of) in AXES.items()},
        accuracy=tuple(point.accuracy for point in run.points),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
