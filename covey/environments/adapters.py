"""Adapters that let Covey use environment classes written for TRL.

An environment class for TRL's `environment_factory` has `reset(**row)`, which may return a text to
add to the prompt. The class may have a method `get_reward`. All public methods of the class except
`reset` and `get_reward` are tools. Covey and TRL handle environment classes differently:

- Covey makes a new instance for each rollout. TRL reuses instances, and calls `reset` before each
  rollout.
- Covey lists tools in the order of their definition in the class. TRL lists tools in alphabetical
  order.
- If `reset` returns images, Covey raises an error.
- If `reset` has a parameter `seed`, Covey passes the same seed to all rollouts of a group. A
  resumed run does not reproduce random numbers that the class draws without the parameter `seed`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from covey.environments.environment import Start, appended
from covey.environments.tool_environment import Tool, ToolEnvironment, tools_of
from covey.errors import ConfigError
from covey.types import Prompt


def as_environment(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a TRL-style environment class in an adapter.

    Classes that have Covey's interface are returned unchanged. A class has Covey's interface if it
    has a method `step`, and a method `reset` with a parameter `seed`. A function may return an
    object of either kind.
    """
    if not inspect.isclass(kind):
        declares = hasattr(kind, "quick") or hasattr(kind, "prepare")
        return kind if declares else partial(_made, kind)
    reset = getattr(kind, "reset", None)
    if reset is None:
        raise ConfigError(
            f"environment: {kind.__name__} has no method 'reset'; an environment needs "
            "reset(prompt, seed) and step(message), or, as in TRL, reset(**row) and public methods"
        )
    is_ours = hasattr(kind, "step") and "seed" in inspect.signature(reset).parameters
    return kind if is_ours else partial(TrlEnvironment, kind)


def _made(function: Callable[..., Any], **options: Any) -> Any:
    made = function(**options)
    adapted = as_environment(type(made))
    return made if adapted is type(made) else TrlEnvironment(lambda: made)


class TrlEnvironment(ToolEnvironment):
    """Adapts a TRL-style environment class to Covey's environment interface."""

    def __init__(self, kind: Callable[..., Any], **options: Any) -> None:
        self._inner = kind(**options)
        if not hasattr(self._inner, "get_reward"):
            self.reward = None  # type: ignore[assignment, method-assign]

    def tools(self) -> dict[str, Tool]:
        """Return the public methods of the TRL-style class as tools."""
        return tools_of(self._inner, without=("reset", "get_reward"))

    async def reset(self, prompt: Prompt, seed: int) -> Start:  # type: ignore[override]
        """Start the episode: pass the prompt as a dataset row to the `reset` of the TRL class."""
        columns = {"target": prompt.target, "answer": prompt.target, **prompt.info}
        row: dict[str, Any] = {**columns, "prompt": [dict(m) for m in prompt.messages]}
        parameters = inspect.signature(self._inner.reset).parameters
        if "seed" in parameters:
            row["seed"] = seed
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            row = {key: value for key, value in row.items() if key in parameters}
        shown = self._inner.reset(**row)
        shown = await shown if inspect.isawaitable(shown) else shown
        start = super().reset(prompt, seed)
        if shown is None:
            return start
        if not isinstance(shown, str):
            raise TypeError(f"reset returned {type(shown).__name__}; only text is supported")
        return replace(start, messages=appended(prompt.messages, shown))

    async def reward(self) -> Any:
        """Return the reward that `get_reward` of the TRL-style class computes."""
        reward = self._inner.get_reward()
        return await reward if inspect.isawaitable(reward) else reward
