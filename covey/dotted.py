"""Functions of the user's own, named by a dotted path such as `my_package.rewards:exact`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from covey.errors import ConfigError


def is_dotted(name: str) -> bool:
    """Whether a name is a path to a function rather than an entry of a registry."""
    return "." in name or ":" in name


def load_dotted(path: str, where: str) -> Callable[..., Any]:
    """Import a function by `package.module:name` or `package.module.name`.

    The working folder is searched as well, as it is for a script.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where} = {path!r}: cannot import {module_name!r}: {why}") from error
    finally:
        sys.path.remove(folder)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where} = {path!r}: {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]
