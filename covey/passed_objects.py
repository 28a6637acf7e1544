"""Checks the arguments of the Python API: datasets, rewards, environments and models."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from covey.config import Config, load_config
from covey.environments.registry import PASSED
from covey.errors import ConfigError, ModelError, RewardError
from covey.records.folder import RunFolder
from covey.records.trackers import Tracker
from covey.rewards.user import FUNCTIONS, own_name
from covey.tasks.rows import NAME as DATASET

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation
    from covey.rewards import Reward

OBJECTS = (
    ("task", "dataset", DATASET),
    ("reward", "rewards", FUNCTIONS),
    ("environment", "environment", PASSED),
)
"""The config section, argument name and placeholder name of each kind of Python object."""


def _is_a(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _lists(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(each, value))


NONE = type(None)
PATH = (_is_a(str, os.PathLike, NONE), "a path")
COUNT = (_is_a(Integral), "an integer")
DATA = (
    _is_a(Iterable, os.PathLike, NONE),
    "a list of dicts, a datasets.Dataset or a JSON Lines file",
)
ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "config": (
            _is_a(Config, Mapping, str, os.PathLike, NONE),
            "a Config, a dict, a TOML file or the name of a recipe",
        ),
        "recipe": (_is_a(str, os.PathLike, NONE), "a TOML file or the name of a recipe"),
        "dataset": DATA,
        "held_out": DATA,
        "callbacks": (_lists(callable), "a list of functions"),
        "trackers": (
            lambda value: value is None or _lists(_is_a(str, Tracker))(value),
            "a list of names and covey.Tracker objects",
        ),
        "run": PATH,
        "resume": PATH,
        "folder": PATH,
        "algorithms": (_lists(_is_a(str)), "a list of names"),
        "arms": (_lists(_is_a(str)), "a list of texts such as 'NAME: KEY=VALUE'"),
        "samples": COUNT,
        "seeds": COUNT,
        "parallel": (_is_a(Integral, NONE), "an integer"),
    }
)
"""Maps each argument to a function that checks its type, and to a description of the type."""


def check_types(**arguments: object) -> None:
    """Raise ConfigError if an argument of the Python API has the wrong type."""
    for name, value in arguments.items():
        is_valid, what = ARGUMENTS[name]
        if not is_valid(value):
            given = f"an object of type {type(value).__name__}"
            if isinstance(value, list | tuple):
                given = f"a {type(value).__name__} of {', '.join(type(x).__name__ for x in value)}"
            raise ConfigError(f"{name} must be {what}, not {given}")


def model_name(model: object) -> str:
    """Return a model's name or folder as text; raise ModelError for a model object."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise ModelError(
        f"model: pass a name or a folder, not an object of type {type(model).__name__}; first save "
        "the model and its tokenizer with save_pretrained(folder), and then pass the folder"
    )


def check_evaluated(config: Config, passed: Collection[str] = ()) -> None:
    """Raise ConfigError if a Python object that the evaluation needs was not passed."""
    missing = [
        (f"{where}.name = {name!r}", f"{argument}=...")
        for where, argument, name in OBJECTS
        if getattr(config, where).name == name and where not in passed
    ]
    if missing:
        settings, arguments = zip(*missing, strict=True)
        raise ConfigError(
            f"config: Python objects must be passed for {' and '.join(settings)}; call "
            f"covey.evaluate(..., {', '.join(arguments)}) in Python"
        )


def check_scored(model: str, evaluation: Evaluation) -> None:
    """Raise RewardError if no completion has a score, rather than report an accuracy of 0 %."""
    completions = sum(1 + len(item.samples) for item in evaluation.items)
    if evaluation.unscored == completions:
        raise RewardError(
            f"{model}: none of the {completions} completions could be scored; the first error: "
            f"{evaluation.first_failure}"
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
