"""The registry of environments, which finds an environment by its name or import path.

To add an environment, write its class in this folder, as in `python.py`, or in the folder of its
recipe, as in `covey/recipes/agent_calculator`, and add it to `ENVIRONMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from covey.environments.adapters import ScoredTrlEnvironment, as_environment
from covey.environments.environment import Factory
from covey.environments.python import Python
from covey.environments.tool_environment import Tools
from covey.environments.verifiers import Verifiers
from covey.errors import ConfigError, nearest
from covey.recipes.agent_calculator.environment import Calculator
from covey.recipes.agent_search.environment import Search
from covey.recipes.code_repair.environment import CodeRepair
from covey.recipes.games.environment import Games
from covey.trust import import_callable, is_import_path

NONE = "none"
"""The value of `environment.name` for single-turn runs, which use no environment."""
PASSED = "class"
"""The value of `environment.name` if the user passed an environment class in Python."""

ENVIRONMENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "calculator": Calculator,
        "code_repair": CodeRepair,
        "games": Games,
        "python": Python,
        "search": Search,
        "tools": Tools,
        "trl": ScoredTrlEnvironment,
        "verifiers": Verifiers,
    }
)
"""Maps names to environment classes; the keyword arguments of a class are its options."""


def find_environment(name: str) -> Callable[..., Any]:
    """Return the environment class or function for a name or for a path `module:Class`."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if is_import_path(name):
        return as_environment(import_callable(name, "environment.name"))
    if name == PASSED:
        raise ConfigError(
            f"config: environment.name = {name!r} needs an environment class from Python; call "
            "covey.train(..., environment=...) in Python, and add resume=RUN to resume a run"
        )
    hint = nearest(name, ENVIRONMENTS)
    raise ConfigError(f"config: environment.name = {name!r} is not a known environment{hint}")


def make_factory(name: str, options: Mapping[str, Any]) -> Factory:
    """Return the factory that makes the environment of each rollout."""
    maker = find_environment(name)
    factory = partial(maker, **options) if options else maker
    if name in ENVIRONMENTS and not hasattr(maker, "prepare"):
        factory()  # finds a mistake in the options before the run
    return factory
