"""Every error that Covey raises for its user.

    CoveyError                 whatever the user can put right; the command line prints one line
    ├── ConfigError            a key, a value or a flag that is not what it should be (exit code 2)
    ├── ModelError             a model or tokenizer that cannot be loaded or used
    ├── DataError              prompts that cannot be used: none at all, or longer than the context
    ├── RewardError            too many answers could not be scored
    ├── RunError               a run folder that cannot be used
    └── DiskError              a write that did not succeed; nothing is left half written

Mistakes of our own are assertions, not these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoveyError(Exception):
    """Something the user can put right. The message is one line that says how."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class ConfigError(CoveyError, ValueError):
    """A key, a value or a flag is not what it should be."""

    exit_code = 2


class ModelError(CoveyError):
    """A model or its tokenizer cannot be loaded or used."""


class DataError(CoveyError):
    """The prompts cannot be used."""


class RewardError(CoveyError):
    """Answers could not be scored."""


class RunError(CoveyError):
    """The run folder cannot be used."""


class DiskError(CoveyError):
    """A write failed, and what it had begun was removed."""


def reason(error: Exception) -> str:
    """Return why a file cannot be read, without its name, which the message has already."""
    return getattr(error, "strerror", None) or str(error)


NEAR = 0.5
"""Names that have less than this in common are not taken for one another."""


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that was probably meant, or None if none is near.

    Letters are often swapped: among those that are near, one with the same letters comes first.
    """
    options = sorted(choices)
    near = difflib.get_close_matches(name, options, n=max(1, len(options)), cutoff=NEAR)
    return min(near, key=lambda option: sorted(option) != sorted(name), default=None)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'seed'?`, or the list of choices if none is near."""
    options = sorted(choices)
    close = closest(name, options)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; choose from {', '.join(options)}" if options else ""
