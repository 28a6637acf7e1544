"""Functions of the user's own, named by a dotted path such as `my_package.rewards:exact`.

Importing a module runs it, so only modules that the user trusts are imported; and what is then
called must have been written for it: a function or a class of Python code in a trusted module. A
name that such a module merely imported, as `run` of subprocess, is not taken.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from covey.errors import ConfigError
from covey.trust import VARIABLE, is_trusted


def is_dotted(name: str) -> bool:
    """Whether a name is a path to a function rather than an entry of a registry."""
    return "." in name or ":" in name


def load_dotted(path: str, where: str) -> Callable[..., Any]:
    """Import a function by `package.module:name` or `package.module.name`, if it is trusted.

    The working folder is searched as well, as it is for a script.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(f"config: {where} = {path!r} is no name such as 'module:function'")
    _check_trust(module_name, path, where)
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
    _check_kind(function, path, where)
    return function  # type: ignore[no-any-return]


def _check_trust(module: str, path: str, where: str) -> None:
    if not is_trusted(module):
        raise ConfigError(
            f"config: {where} = {path!r} runs code of the module {module!r}, which is not trusted; "
            f"if you know that code, add --trust {module}, or set {VARIABLE}={module}"
        )


def _check_kind(function: Any, path: str, where: str) -> None:
    """Refuse what is no Python code, and what was written in a module that is not trusted."""
    written = function
    while isinstance(written, functools.partial):
        written = written.func
    written = inspect.unwrap(written)
    if not (inspect.isfunction(written) or inspect.isclass(written)):
        written = type(written)  # an object that can be called is what its class makes of it
        if not inspect.isfunction(written.__call__):
            raise ConfigError(f"config: {where} = {path!r} is no function or class of Python code")
    _check_trust(str(written.__module__), path, where)
    try:
        inspect.signature(function)
    except (ValueError, TypeError):
        raise ConfigError(f"config: {where} = {path!r} does not say what it takes") from None
