"""Registry of the trackers that the setting `trackers` accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from covey.errors import ConfigError, nearest
from covey.records.folder import RunFolder
from covey.records.trackers.external import ExternalTracker
from covey.records.trackers.protocol import Tracker
from covey.records.trackers.tensorboard import TensorBoardTracker
from covey.records.trackers.trackio import TrackioTracker
from covey.records.trackers.wandb import WandbTracker

TRACKERS: Mapping[str, type[ExternalTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""Maps each name that the setting `trackers` accepts to a tracker class. The Python package that a
tracker needs, and the pip extra that installs this package, have the same name as the tracker."""


def check_trackers(names: Iterable[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            hint = nearest(name, TRACKERS)
            raise ConfigError(f"config: trackers: {name!r} is not a known tracker{hint}")
        if find_spec(name) is None:
            raise ConfigError(
                f"config: trackers: {name!r} is not installed: pip install 'covey[{name}]'"
            )


def make_trackers(
    names: Iterable[str], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    return [TRACKERS[name](run, settings) for name in dict.fromkeys(names)]
