"""Ctrl-C and SIGTERM during a run.

The first signal lets the step in progress end. A step that waits for another process or machine
might wait for minutes, so such a wait is given up some seconds after the signal.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

GRACE_SECONDS = 3.0
"""How long a wait may last after a signal."""
POLL_SECONDS = 0.25
"""How often to check whether the step is now in a wait."""

_waits = 0
"""How many waits the main thread is in, one inside the other. Signals reach no other thread."""


class GivenUp(BaseException):
    """A wait was ended because a signal asked the run to stop. Never leaves the training loop."""


@contextmanager
def may_be_given_up() -> Iterator[None]:
    """Mark a wait for others, which a signal ends with GivenUp; in the main thread only."""
    global _waits
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1


@dataclass(slots=True)
class StopSignal:
    """Ctrl-C or SIGTERM: the step in progress is finished and saved, then the loop ends."""

    received: str | None = None
    """The name of the signal, or why the run itself asked to stop."""

    def ask(self, why: str) -> None:
        """Let the loop end after this step, unless a signal asked already."""
        self.received = self.received or why

    @property
    def by_signal(self) -> bool:
        """Whether a signal was received."""
        return self.received in signal.Signals.__members__

    @property
    def exit_code(self) -> int:
        """What shells expect of a process that a signal ended: 130 or 143."""
        assert self.received is not None
        return exit_code(signal.Signals[self.received])


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal ended."""
    return 128 + number


@contextmanager
def stop_signal(repeats: float = 0.0) -> Iterator[StopSignal]:
    """Turn the first SIGINT or SIGTERM into a flag; the second ends the process at once.

    A signal within `repeats` seconds of the first is the same one, sent on: a terminal sends Ctrl-C
    to every process, and a launcher sends it to its ranks again.
    """
    stop, first = StopSignal(), 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if stop.by_signal:
            if time.monotonic() < first + repeats:
                return
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(exit_code(number))
        stop.received, first = signal.Signals(number).name, time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS, POLL_SECONDS)

    def look(number: int, frame: FrameType | None) -> None:
        if _waits:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise GivenUp

    handlers = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGALRM: look}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
