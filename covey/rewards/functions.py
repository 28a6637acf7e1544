"""Reward functions that were passed in Python: one, several, or several with weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.errors import ConfigError
from covey.rewards.score import Reward, Score
from covey.rewards.user import UserFunction, as_reward
from covey.types import Prompt

RewardFunction = Callable[..., Any]
NAME = "functions"
"""What `reward.name` is in the configuration of a run whose reward came from Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFunctions:
    """The weighted sum of reward functions; each is a part of the reward under its own name.

    A completion succeeds if the first function gives it at least 1. They run in this process, as
    they would in TRL: a function that hangs holds up the run.
    """

    functions: Mapping[str, UserFunction]
    weights: Mapping[str, float]

    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    quick: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        (score,) = self.score_group(prompt, [text])
        if score is None:
            raise ValueError("a reward function returned None")
        return score

    def score_group(self, prompt: Prompt, texts: Sequence[str]) -> list[Score | None]:
        """Score the completions of a prompt; None for those that some function cannot score."""
        columns = [_run(function, prompt, texts) for function in self.functions.values()]
        return [self._total(row) for row in zip(*columns, strict=True)]

    def _total(self, scores: Sequence[Score | None]) -> Score | None:
        parts: dict[str, float] = {}
        for name, score in zip(self.functions, scores, strict=True):
            if score is None:
                return None
            parts[name] = score.reward
        total = math.fsum(self.weights[name] * value for name, value in parts.items())
        first = scores[0]
        return Score(reward=total, success=first is not None and first.success, parts=parts)


def _run(function: UserFunction, prompt: Prompt, texts: Sequence[str]) -> list[Score | None]:
    """Call a function for a group; in a notebook, whose event loop is running, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function.score_group(prompt, texts)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function.score_group, prompt, texts).result()


def function_reward(
    rewards: RewardFunction | Reward | Sequence[RewardFunction] | Mapping[RewardFunction, float],
) -> Reward:
    """Make a reward of TRL-style functions: one, a list, or a dict of function to weight.

    An object that is a reward already (it has bounds, quick and version) stays as it is.
    """
    if callable(rewards) and not isinstance(rewards, Mapping | Sequence):
        made = as_reward(rewards)
        if not isinstance(made, UserFunction):
            return made
        rewards = [rewards]
    pairs = list(rewards.items()) if isinstance(rewards, Mapping) else [(f, 1.0) for f in rewards]
    if not pairs:
        raise ConfigError("rewards: give at least one reward function")
    functions: dict[str, UserFunction] = {}
    weights: dict[str, float] = {}
    for function, weight in pairs:
        made = as_reward(function)
        if not isinstance(made, UserFunction):
            raise ConfigError("rewards: a list holds functions; use the reward `mix` for others")
        name = getattr(function, "__name__", type(function).__name__)
        if name in functions:
            raise ConfigError(f"rewards: two functions are called {name}; their parts need names")
        if not math.isfinite(weight):
            raise ConfigError(f"rewards: the weight of {name} is {weight}")
        functions[name], weights[name] = made, float(weight)
    return WeightedFunctions(functions=functions, weights=weights)
