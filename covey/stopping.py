"""Handling of Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 during a run.

SIGHUP arrives when a terminal is closed, and SIGUSR1 when a batch system announces the end of a
job. After the first signal, the run finishes the current step. If the step is waiting for another
process or machine, the run stops waiting a few seconds after the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TextIO, TypeGuard

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
    """A request to stop the run, usually by a signal.

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
        """The exit code that shells expect after a signal, such as 130 after Ctrl-C."""
        assert self.received is not None
        return exit_code(signal.Signals[self.received])


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal ended."""
    return 128 + number


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run, without those that this process was told to ignore.

    `nohup` starts a process that ignores SIGHUP.
    """
    polite = (signal.SIGHUP, signal.SIGUSR1)
    kept = (number for number in polite if signal.getsignal(number) is not signal.SIG_IGN)
    return (signal.SIGINT, signal.SIGTERM, *kept)


@contextmanager
def stop_signal(repeats: float = 0.0) -> Iterator[StopSignal]:
    """Turn a signal into a request to stop; a second SIGINT or SIGTERM ends the process at once.

    Covey ignores a second SIGINT or SIGTERM within `repeats` seconds of the first, because one
    Ctrl-C may arrive twice. The terminal sends the signal of Ctrl-C to all processes, and a
    launcher forwards this signal to its ranks. SIGHUP and SIGUSR1 never end the process at once:
    when a terminal is closed, both the kernel and the shell send SIGHUP.
    """
    stop, first = StopSignal(), 0.0
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if _is_open(stream)]
    terminals = [number for number in terminals if os.isatty(number)]

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if number in (signal.SIGINT, signal.SIGTERM):
            if first:
                if time.monotonic() < first + repeats:
                    return
                raise (
                    KeyboardInterrupt if number == signal.SIGINT else SystemExit(exit_code(number))
                )
            first = time.monotonic()
        if number == signal.SIGHUP:
            _discard_output(terminals)
        if not stop.by_signal:
            stop.received = signal.Signals(number).name
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS, POLL_SECONDS)

    def look(number: int, frame: FrameType | None) -> None:
        if _waits:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise GivenUp

    handlers = {**dict.fromkeys(stopping_signals(), handle), signal.SIGALRM: look}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_open(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not stream.closed


def _discard_output(terminals: Sequence[int]) -> None:
    """Send what is written to a closed terminal to /dev/null, where writing does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)
