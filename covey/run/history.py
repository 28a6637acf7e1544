"""Store the metrics of a run's first and recent steps, for health checks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, TypeGuard

KEPT = 60
"""Number of recent steps whose metrics stay in memory for health checks."""
START = 5
"""The initial value of a metric is its mean over this many steps at the start of the run."""
BLOCK = 5
"""Number of successive training steps in one block. Health checks compare a metric's means over two
blocks of steps."""
REWARD = "objective/scores"


@dataclass(slots=True)
class History:
    """The metrics of the first and the last steps of a run."""

    rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    first: dict[str, list[float]] = field(default_factory=dict)
    """Maps each metric to its values in the first steps of the run."""
    most: dict[str, float] = field(default_factory=dict)
    """Maps each metric to its largest absolute value so far."""
    best: float = -math.inf
    """The highest mean reward over a block of steps. The most recent blocks do not count."""
    blocks: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCK))

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of the next step."""
        self.rows.append(row)
        for name, value in row.items():
            if is_number(value):
                start = self.first.setdefault(name, [])
                if len(start) < START:
                    start.append(value)
                self.most[name] = max(abs(value), self.most.get(name, 0.0))
        if rewards := self.last(REWARD, BLOCK):
            if len(self.blocks) == BLOCK:
                self.best = max(self.best, self.blocks[0])
            self.blocks.append(fmean(rewards))

    @property
    def row(self) -> Mapping[str, Any]:
        """The last step."""
        return self.rows[-1]

    def last(self, name: str, count: int, before: int = 0) -> list[float]:
        """Return the values of a metric in `count` successive steps that ended `before` steps ago.

        Return [] if the metric is missing in one of the steps.
        """
        stop = len(self.rows) - before
        if stop < count:
            return []
        values = [self.rows[place].get(name) for place in range(stop - count, stop)]
        return [v for v in values if is_number(v)] if all(map(is_number, values)) else []

    def mean(self, name: str, count: int, before: int = 0) -> float:
        """Return the mean of the values that `last` returns, or NaN if a value is missing."""
        values = self.last(name, count, before)
        return fmean(values) if values else math.nan

    def start(self, name: str) -> float:
        """Return the mean of a metric's first values, or NaN if there are too few values."""
        values = self.first.get(name, [])
        return fmean(values) if len(values) == START else math.nan

    def parts(self) -> list[str]:
        """Return the names of the metrics that log the parts of the reward."""
        return [name for name in self.row if name.startswith("objective/parts/")]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation of the noise in a series that may have a trend.

    >>> noise([1.0, 2.0, 3.0, 4.0]), round(noise([0, 1, 0, 1, 0]), 3)
    (0.0, 1.048)
    """
    steps = [b - a for a, b in pairwise(values)]
    middle = median(steps)
    # The median of |a - b| is 0.954 sigma for normal noise.
    return median(abs(step - middle) for step in steps) / 0.954
