"""Prints notes for the user on stderr, and hides all notes for `covey.train(quiet=True)`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from covey.escape import printable

VARIABLE = "COVEY_QUIET"
"""If this environment variable is set, Covey prints no notes. Child processes inherit this
environment variable, so they print no notes either."""


def notice(text: str) -> None:
    """Print a note for the user on stderr."""
    if not is_quiet():
        print(printable(f"covey: {text}"), file=sys.stderr, flush=True)


def is_quiet() -> bool:
    """Return whether notes and progress bars are hidden."""
    return VARIABLE in os.environ


@contextmanager
def quiet(hide: bool) -> Iterator[None]:
    """Hide all notes and progress bars in the `with` block if `hide` is true."""
    if not hide or is_quiet():
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
