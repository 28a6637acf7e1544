"""Import functions that a config names, but only from modules that the user trusts.

A downloaded config, run folder or comparison may name a function in any module, and importing a
module runs its code. Covey therefore imports only modules that the user has listed with
`--trust MODULE` or in the environment variable COVEY_TRUST, which worker processes inherit. The
Python API accepts functions of any module, because the user chose to run the calling program.

A function that a config names must be defined in Python, in a trusted module. Covey refuses a
function such as `subprocess.run` that is defined in an untrusted module, even if a trusted module
imports it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, users_error

VARIABLE = "COVEY_TRUST"
"""The environment variable that lists trusted modules. If a package is trusted, all its modules are
trusted."""


def trust(modules: Iterable[str]) -> None:
    """Trust modules in this process and in all processes that this process starts later."""
    named = (part.strip() for text in modules for part in text.split(","))
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*_trusted(), *filter(None, named)]))


def is_trusted(module: str) -> bool:
    """Return whether a module, or a package that contains the module, is trusted."""
    return any(module == name or module.startswith(f"{name}.") for name in _trusted())


@contextmanager
def scoped_trust() -> Iterator[None]:
    """Context manager that restores the previously trusted modules on exit."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def is_import_path(name: str) -> bool:
    """Return whether a name is an import path, and not the name of a built-in object."""
    return "." in name or ":" in name


def import_callable(path: str, setting: str) -> Callable[..., Any]:
    """Import a trusted function or class by `package.module:name` or `package.module.name`.

    The module may also be in the working directory. Error messages name the config key `setting`.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(f"config: {setting} = {path!r} must have the form 'module:function'")
    _check_trust(module_name, path, setting)
    folder = os.getcwd()
    sys.path.insert(0, folder)
    # Python reuses the bytecode of a file with the same size and the same modification time in
    # seconds. A reward edited twice within a second would run its old code under its new identity.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module can raise anything while it is imported
        why = str(error) if isinstance(error, ImportError) else users_error(error)
        raise ConfigError(f"{setting} = {path!r}: cannot import {module_name!r}: {why}") from error
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{setting} = {path!r}: {module_name!r} has no function {name!r}")
    _check_origin(function, path, setting)
    return function  # type: ignore[no-any-return]


def import_path(function: Any, setting: str) -> str:
    """Return the import path `module:name` of a function or class, for another process.

    A function of the main script is named by the script's module, which the other process imports.
    """
    module, name = str(function.__module__), str(getattr(function, "__qualname__", ""))
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else ""
    if not module or not name.isidentifier():
        raise ConfigError(
            f"{setting}: {function!r:.80} cannot be imported by another process; define it with "
            "`def` or `class` at the top level of a module, such as my_rewards.py"
        )
    return f"{module}:{name}"


def _trusted() -> list[str]:
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return [name for name in names if name]


def _check_trust(module: str, path: str, setting: str) -> None:
    if not is_trusted(module):
        raise ConfigError(
            f"config: {setting} = {path!r} would run code of the module {module!r}, which is not "
            f"trusted; if you trust this code, add --trust {module}, or set the environment "
            f"variable {VARIABLE}={module}"
        )


def _check_origin(function: Any, path: str, setting: str) -> None:
    """Raise ConfigError if a callable is not Python code or comes from an untrusted module."""
    defined = function
    while isinstance(defined, functools.partial):
        defined = defined.func
    defined = inspect.unwrap(defined)
    if not (inspect.isfunction(defined) or inspect.isclass(defined)):
        defined = type(defined)  # for a callable object, its class has the code
        if not inspect.isfunction(defined.__call__):
            raise ConfigError(f"config: {setting} = {path!r} is not a Python function or class")
    _check_trust(str(defined.__module__), path, setting)
    try:
        inspect.signature(function)
    except (ValueError, TypeError):
        raise ConfigError(
            f"config: {setting} = {path!r}: Python cannot determine the parameters of this "
            "function; wrap the function in a Python function with named parameters"
        ) from None
