"""Checks objects passed to the Python API: datasets, rewards, environments and models."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from covey.config import Config, load_config
from covey.environments.registry import PASSED
from covey.errors import ConfigError, ModelError
from covey.rewards.user import FUNCTIONS, own_name
from covey.run.folder import RunFolder
from covey.tasks.dataset import NAME as DATASET

if TYPE_CHECKING:
    from covey.rewards import Reward

OBJECTS = (
    ("task", "dataset", DATASET),
    ("reward", "rewards", FUNCTIONS),
    ("environment", "environment", PASSED),
)
"""The config section, argument name and placeholder name of each kind of Python object."""


def model_name(model: object) -> str:
    """Return a model's name or folder as text; raise ModelError for a model object."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise ModelError(
        f"model: pass a name or a folder, not an object of type {type(model).__name__}; first save "
        "the model and its tokenizer with save_pretrained(folder), and then pass the folder"
    )


def check_evaluated(config: Config, passed: Collection[str] = ()) -> None:
    """Raise ConfigError if a dataset or reward that the evaluation needs was not passed."""
    missing = [
        (f"{where}.name = {name!r}", f"{argument}=...")
        for where, argument, name in OBJECTS[:2]
        if getattr(config, where).name == name and where not in passed
    ]
    if missing:
        settings, arguments = zip(*missing, strict=True)
        raise ConfigError(
            "config: the evaluation needs the Python objects of the settings "
            f"{' and '.join(settings)}; call covey.evaluate(..., {', '.join(arguments)}) in "
            "Python"
        )


def check_resumed(folder: RunFolder, passed: Collection[str], reward: Reward | None) -> None:
    """Raise ConfigError if a run is resumed with different Python objects than at its start."""
    config = load_config(str(folder.config_file))
    for where, argument, name in OBJECTS:
        before = getattr(config, where).name == name
        if before and where not in passed:
            raise ConfigError(
                f"resume: the run {folder.path} was started with the argument {argument}; pass the "
                "same argument again"
            )
        if where in passed and not before:
            raise ConfigError(
                f"resume: the run {folder.path} was started without the argument {argument}; leave "
                "the argument out"
            )
    then = str(folder.environment().get("reward") or "").partition("@")[0]
    if reward is not None and then not in ("", FUNCTIONS, own_name(reward)):
        raise ConfigError(
            f"resume: the run {folder.path} was started with the reward {then}; pass this reward "
            f"instead of the reward {own_name(reward)}"
        )
