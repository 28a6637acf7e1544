"""Handling of Ctrl-C and SIGTERM during a run.

After the first signal, the run finishes the current step. If the step is waiting for another
process or machine, the run stops waiting a few seconds after the signal.
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
"""Seconds after a stop signal until Covey gives up waiting for another process."""
POLL_SECONDS = 0.25
"""Seconds between two checks of whether the main thread waits for another process."""

_waits = 0
"""Number of nested `may_be_given_up` blocks that the main thread is in."""


class GivenUp(BaseException):
    """Exception that ends the main thread's wait for another process after a stop signal.

    The training loop catches this exception.
    """


@contextmanager
def may_be_given_up() -> Iterator[None]:
    """Context manager for waiting in the main thread; a stop signal may end the wait with
    GivenUp."""
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
    """A request to stop the run, usually by Ctrl-C or SIGTERM.

    After the request, the training loop finishes the current step, saves a checkpoint and ends.
    """

    received: str | None = None
    """Name of the received signal, or another reason to stop; None if the run continues."""

    def ask(self, why: str) -> None:
        """Ask the training loop to stop after the current step; only the first reason is kept."""
        self.received = self.received or why

    @property
    def by_signal(self) -> bool:
        """Whether a signal was received."""
        return self.received in signal.Signals.__members__

    def exception(self, message: str) -> BaseException:
        """Return the exception that ends the calling script after the signal."""
        ctrl_c = self.received == signal.SIGINT.name
        return KeyboardInterrupt(message) if ctrl_c else SystemExit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after a signal: 130 or 143."""
        assert self.received is not None
        return exit_code(signal.Signals[self.received])


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal ended."""
    return 128 + number


@contextmanager
def stop_signal(repeats: float = 0.0) -> Iterator[StopSignal]:
    """Turn the first SIGINT or SIGTERM into a flag; a second signal ends the process at once.

    Covey ignores a signal within `repeats` seconds of the first signal, because one Ctrl-C may
    arrive twice. The terminal sends the signal of Ctrl-C to all processes, and a launcher forwards
    this signal to its ranks.
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
