"""The results and the time limit of the checks of `covey doctor`.

This module does not import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from covey.escape import printable_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check."""

    name: str
    passed: bool | None
    """Whether the check passed, or None if it was skipped or does not apply."""
    figure: str
    remedy: str = ""
    seconds: float = 0.0

    @property
    def sign(self) -> str:
        return {True: "✔", False: "✗", None: "-"}[self.passed]

    def row(self) -> dict[str, Any]:
        return asdict(self)


Checks = Callable[[], Iterator[Result]]


def results_of(name: str, checks: Checks) -> Iterator[Result]:
    """Yield the results of checks.

    If the checks raise an error, yield a failed result called `name`.
    """
    started = time.perf_counter()
    try:
        for result in checks():
            now = time.perf_counter()
            yield replace(result, seconds=round(now - started, 2))
            started = now
    except Exception as error:
        yield Result(
            name=name,
            passed=False,
            figure=f"{type(error).__name__}: {printable_line(str(error), 300)}",
            remedy="the check itself failed; fix the error that this line shows",
            seconds=round(time.perf_counter() - started, 2),
        )


# The time limit of `covey doctor`: the time left, and which checks would exceed it.

LIMIT = 110.0
"""The time limit of all checks together, in seconds. `covey doctor` takes less than two minutes,
including the start of Python and the imports.
"""


@dataclass(slots=True, kw_only=True)
class Pace:
    """The estimated or measured time of each part of a small training step, in seconds."""

    load: float = 0.0
    """The time to load the model and to build the engine and the task, in seconds."""
    rollout: float = 0.0
    update: float = 0.0
    """The time to compute the gradient over all completions of a step, in seconds."""

    @contextmanager
    def measures(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self, part, time.perf_counter() - started)

    @property
    def resume(self) -> float:
        """The seconds of the resume check, which trains three steps in two runs.

        Writing a checkpoint takes about as long as loading the model, so the estimate counts a
        checkpoint as one load.
        """
        return 3 * (self.rollout + self.update) + 5 * self.load


@dataclass(slots=True, kw_only=True)
class Clock:
    """Announces each check, and skips checks that would take longer than the time limit."""

    limit: float = math.inf
    say: Callable[[str], None] = lambda text: None
    pace: Pace = field(default_factory=Pace)
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.started)

    def skips(self, name: str, expected: float = 0.0) -> Result | None:
        """Announce the check, or return a skipped result if too little time is left."""
        left = max(0.0, self.left)
        if expected <= left:
            self.say(f"{name}{f', about {expected:.0f} s' if expected >= 1 else ''}")
            return None
        figure = f"skipped: would take {expected:.0f} s, and {left:.0f} s are left (--seconds)"
        return Result(name=name, passed=None, figure=figure)
