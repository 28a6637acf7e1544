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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from covey.environments.environment import Factory, Start, Step, appended
from covey.environments.tool_environment import Tool, ToolEnvironment, tools_of
from covey.errors import ConfigError
from covey.trust import import_callable
from covey.types import Message, Prompt


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
        if type(self).reward is TrlEnvironment.reward and not hasattr(self._inner, "get_reward"):
            self.reward = None  # type: ignore[assignment, method-assign]

    def tools(self) -> dict[str, Tool]:
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
        reward = self._inner.get_reward()
        return await reward if inspect.isawaitable(reward) else reward


class ScoredTrlEnvironment(TrlEnvironment):
    """A TRL-style environment with TRL's reward functions, which get the environment itself.

    `factory` is the import path of the class, or of a function that makes the environment. At the
    end of an episode, each function in `rewards` is called with lists of one item, and with
    `environments`. The reward is the sum, weighted by `weights`. A message that a limit has cut off
    is not among the completion's messages.
    """

    def __init__(
        self, *, factory: str, rewards: Sequence[str], weights: Sequence[float] = ()
    ) -> None:
        super().__init__(import_callable(factory, "environment.factory"))
        self._rewards = [import_callable(path, "environment.rewards") for path in rewards]
        self._weights = list(weights) or [1.0] * len(self._rewards)
        self._row: dict[str, Any] = {}
        self._messages: list[Message] = []

    @staticmethod
    def prepare(factory: str, rewards: Sequence[str], weights: Sequence[float] = ()) -> None:
        """Import the modules when a process starts, because that may take long."""
        for path in (factory, *rewards):
            import_callable(path, "environment")

    async def reset(self, prompt: Prompt, seed: int) -> Start:  # type: ignore[override]
        """Start the episode, and keep the columns of the prompt for the reward functions."""
        columns = {"target": prompt.target, "answer": prompt.target}
        self._row = {**columns, **prompt.info, **prompt.columns}
        self._row["prompts"] = [dict(message) for message in prompt.messages]
        return await super().reset(prompt, seed)

    async def step(self, message: Message) -> Step:
        """Run the tool calls of a message, and keep all messages for the reward functions."""
        step = await super().step(message)
        self._messages += [message, *step.messages]
        return step

    async def reward(self) -> dict[str, float]:
        given = {
            **{name: [value] for name, value in self._row.items()},
            "completions": [self._messages],
            "environments": [self._inner],
        }
        found = {}
        for function, weight in zip(self._rewards, self._weights, strict=True):
            parameters = inspect.signature(function).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            own = given if takes_all else {k: v for k, v in given.items() if k in parameters}
            values = function(**own)
            (value,) = await values if inspect.isawaitable(values) else values
            if value is not None:  # as in TRL, the function does not apply to this completion
                found[function.__name__] = weight * float(value)
        return found


def environment_factory(environment: Any) -> Factory:
    """Return the factory for an environment class or function that was passed from Python."""
    if not callable(environment):
        raise ConfigError(
            "environment: pass a class, or a function that creates an environment for each "
            f"rollout; an object of type {type(environment).__name__} is neither"
        )
    return as_environment(environment)
