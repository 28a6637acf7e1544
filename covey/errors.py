"""Errors that a user can fix, and hints for misspelled names.

    CoveyError                 a mistake that the user can fix; printed as one line
    ├── ConfigError            a wrong key, value or flag (exit code 2)
    ├── ModelError             a model or tokenizer that cannot be loaded or used
    ├── EngineError            an engine that cannot be started, reached or trusted
    ├── DataError              unusable prompts: none at all, or longer than the context
    ├── RewardError            too many completions could not be scored
    ├── RunError               a run folder that cannot be used
    └── DiskError              a failed write; no partial file is left

A bug in Covey raises AssertionError instead of a CoveyError.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class CoveyError(Exception):
    """A mistake that the user can fix; the message says in one line how to fix it."""

    exit_code = 1
    details = ""
    """Details of the error for failure.txt, such as the traceback of another process."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class ConfigError(CoveyError, ValueError):
    """A configuration key, a value or a command-line flag is wrong."""

    exit_code = 2


class ModelError(CoveyError):
    """A model or its tokenizer cannot be loaded or used."""


class EngineError(CoveyError):
    """An engine cannot be started or reached, or returns invalid results."""


class DataError(CoveyError):
    """The dataset's prompts cannot be used."""


class RewardError(CoveyError):
    """Too many completions could not be scored."""


class RunError(CoveyError):
    """The run folder cannot be used."""


class DiskError(CoveyError):
    """A write failed, and Covey has removed the incomplete file."""


def reason(error: Exception) -> str:
    """Return why a file operation failed, without the name of the file."""
    return getattr(error, "strerror", None) or str(error)


def users_error(error: BaseException) -> str:
    """Return an error as text, with the place in the user's code that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    # Inside the sandbox this module has no __file__, so the name must not be read at import.
    others = (*python, str(Path(__file__).parent), "<frozen ")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


NEAR = 0.5
"""Minimum `difflib` similarity at which a name is suggested."""


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to a name, or None if no choice is similar.

    A choice with the same letters in a different order takes precedence, because swapped letters
    are a common typo.
    """
    options = sorted(choices)
    near = difflib.get_close_matches(name, options, n=max(1, len(options)), cutoff=NEAR)
    return min(near, key=lambda option: sorted(option) != sorted(name), default=None)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'seed'?`; if no choice is similar, list all choices."""
    options = sorted(choices)
    close = closest(name, options)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; choose from {', '.join(options)}" if options else ""
