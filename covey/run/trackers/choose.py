"""The trackers that a configuration can name, and the packages that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from covey.errors import ConfigError, nearest
from covey.run.folder import RunFolder
from covey.run.trackers.protocol import Tracker

TRACKERS: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "TensorBoardTracker", "wandb": "WandbTracker", "trackio": "TrackioTracker"}
)
"""Maps the name of each tracker to its class name. The tracker's name is also the name of its
module, of the Python package that it needs, and of the pip extra.
"""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if a tracker is unknown or its Python package is not installed."""
    for name in names:
        if name not in TRACKERS:
            hint = nearest(name, TRACKERS)
            raise ConfigError(f"config: trackers: {name!r} is not a tracker{hint}")
        if find_spec(name) is None:
            raise ConfigError(
                f"config: trackers: {name!r} is not installed: pip install 'covey[{name}]'"
            )


def make_trackers(
    names: Iterable[str], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Build the named trackers of a run."""
    modules = {name: import_module(f"covey.run.trackers.{name}") for name in dict.fromkeys(names)}
    return [getattr(module, TRACKERS[name])(run, settings) for name, module in modules.items()]
