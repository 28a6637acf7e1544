"""Results of the doctor's checks. This module does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check."""

    name: str
    passed: bool | None
    """Whether the check passed; None if it does not apply to this configuration."""
    figure: str
    """What was found."""
    remedy: str = ""
    """Advice for the case that the check failed."""
    seconds: float = 0.0

    @property
    def sign(self) -> str:
        """A tick if the check passed, a cross if it failed, a dash if it does not apply."""
        return {True: "✔", False: "✗", None: "-"}[self.passed]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


Checks = Callable[[], Iterator[Result]]


def results_of(name: str, checks: Checks) -> Iterator[Result]:
    """Yield the results of some checks; an exception counts as a failed check called `name`."""
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
            figure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="the check could not be done; solve what this line says",
            seconds=round(time.perf_counter() - started, 2),
        )
