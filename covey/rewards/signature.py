"""The two kinds of reward functions, Covey's and TRL's, distinguished by their parameter names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from covey.errors import ConfigError

OWN = ("prompt", "text")
"""The first two parameters of a function that scores one completion."""
TRL = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)
"""The keyword arguments that TRL passes in addition to the columns of the data."""
NOT_PASSED = frozenset({"log_extra", "log_metric", "environments"})
"""Arguments that TRL passes to a reward function and Covey does not pass."""


def is_trl_style(function: Callable[..., Any]) -> bool:
    """Whether a function scores a list of completions, as in TRL; otherwise it scores one text.

    A function with one of TRL's parameter names is a TRL function, because TRL passes every
    argument by name. A function with `**kwargs` whose other parameters are columns of the data is a
    TRL function too. Raises ConfigError if the parameter names fit neither kind of function.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise _not_a_reward(function, "its parameters are unknown") from None
    own, theirs = _own_names(parameters), bool(parameters.keys() & TRL)
    kinds = {p.kind for p in parameters.values()}
    columns = inspect.Parameter.VAR_KEYWORD in kinds
    if "completions" in parameters or (theirs and own < len(OWN)):
        return True
    if not own and columns and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return True
    if (own == len(OWN) and not theirs) or (own == 1 and not columns):
        return False
    raise _not_a_reward(function, "the names of its parameters do not say which kind it is")


def check_signature(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a function that cannot be called as a reward with the given options."""
    if is_trl_style(function):
        return
    try:
        inspect.signature(function).bind(None, "", **options)
    except TypeError as error:
        raise _not_a_reward(function, str(error)) from None


def _own_names(parameters: Mapping[str, inspect.Parameter]) -> int:
    """Count how many of the first two positional parameters are named as in `OWN`, or `_`."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [name.strip("_") for name, p in parameters.items() if p.kind in positional]
    return sum(name in ("", wanted) for name, wanted in zip(given, OWN, strict=False))


def _not_a_reward(function: Callable[..., Any], why: str) -> ConfigError:
    name = getattr(function, "__name__", type(function).__name__)
    return ConfigError(
        f"reward: {name} is not a reward function: {why}; define f(prompt, text), which scores one "
        "completion, or f(completions, **columns) as in TRL, which scores all completions of a "
        "prompt"
    )
