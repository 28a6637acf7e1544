"""Packages that only some tasks need."""

from __future__ import annotations

import importlib
from typing import Any

from covey.errors import ConfigError


def optional_module(name: str, package: str) -> Any:
    """Import a module of an optional package, or say how it is installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"task: this task needs {package}: pip install covey[tasks] ({error})"
        ) from None
