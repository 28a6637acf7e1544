"""The clock of a checkup: the time that is left, and the checks that would take too long.

This module does not import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from covey.analysis.doctor.result import Result

LIMIT = 110.0
"""Time limit of a checkup in seconds. Including the start of Python and the imports, `covey doctor`
takes less than two minutes.
"""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Seconds of each part of a small training step: estimated at first, measured later."""

    load: float = 0.0
    """Seconds to build the model, the engine and the task."""
    rollout: float = 0.0
    update: float = 0.0
    """Seconds to compute the gradient over all completions of a step."""

    @contextmanager
    def measures(self, part: str) -> Iterator[None]:
        """Measure the seconds of one part of a step."""
        started = time.perf_counter()
        yield
        setattr(self, part, time.perf_counter() - started)

    @property
    def resume(self) -> float:
        """Seconds of the resume check, which trains three steps in two runs.

        Writing a checkpoint takes about as long as loading a model.
        """
        return 3 * (self.rollout + self.update) + 5 * self.load


@dataclass(slots=True, kw_only=True)
class Clock:
    """Announces each check, and skips a check that would not end within the limit."""

    limit: float = math.inf
    say: Callable[[str], None] = lambda text: None
    pace: Pace = field(default_factory=Pace)
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds until the time limit."""
        return self.limit - (time.perf_counter() - self.started)

    def skips(self, name: str, expected: float = 0.0) -> Result | None:
        """Announce a check, and return None.

        If the check would take too long, return a skipped result instead.
        """
        left = max(0.0, self.left)
        if expected <= left:
            self.say(f"{name}{f', about {expected:.0f} s' if expected >= 1 else ''}")
            return None
        figure = f"skipped: would take {expected:.0f} s, and {left:.0f} s are left (--seconds)"
        return Result(name=name, passed=None, figure=figure)
