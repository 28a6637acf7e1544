"""Whose code a configuration may run: modules that the user has named, and no others.

A configuration, a run folder and a comparison can be downloaded, and each may name a function of
any module. So a name alone runs nothing: the module must be trusted by the person who gives the
command, with `--trust MODULE` or the environment variable COVEY_TRUST. The decision lives in the
environment, where worker processes find it. What a user's own program passes as an object needs
none: the user wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

VARIABLE = "COVEY_TRUST"
"""Modules by name, separated by commas. A package stands for all modules in it."""


def trust(modules: Iterable[str]) -> None:
    """Trust modules, in this process and in those that it starts from now on."""
    named = (part.strip() for text in modules for part in text.split(","))
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*_trusted(), *filter(None, named)]))


def is_trusted(module: str) -> bool:
    """Tell whether a module, or a package that it stands in, is trusted."""
    return any(module == name or module.startswith(f"{name}.") for name in _trusted())


@contextmanager
def trust_ends_here() -> Iterator[None]:
    """Take back at the end what was trusted inside."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _trusted() -> list[str]:
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return [name for name in names if name]
