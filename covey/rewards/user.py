"""Rewards from users' functions: plain, async or TRL-style, alone or as a weighted sum."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from covey.errors import ConfigError
from covey.rewards.score import NO_CALL, Call, Reward, Score
from covey.types import Message, Prompt, episode_of

RewardFunction = Callable[..., Any]
FUNCTIONS = "functions"
"""The value of `reward.name` in a run whose reward functions were passed from Python."""


class _GroupReward(Reward):
    """A reward that scores all completions of a prompt in one call."""

    takes_call: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        (score,) = self.score_group(prompt, [text])
        if score is None:
            raise ValueError("the function returned None")
        return score

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], call: Call = NO_CALL
    ) -> list[Score | None]:
        """Score the completions of one prompt. A completion that cannot be scored gets None."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The run's progress in optimizer steps, with the field names of transformers' TrainerState."""

    global_step: int
    """Number of optimizer steps before the current training step. A training step has
    `train.mini_batches` times `train.epochs` optimizer steps.
    """
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction(_GroupReward):
    """A reward that calls the user's function.

    - A plain function `f(prompt, text)` returns a number, a `Score`, or a mapping of reward parts.
      The sum of the parts is the reward.
    - A TRL-style function, such as `f(completions, **columns)`, is called once per group and
      returns a list of numbers. Each column is a list with one value per completion. The columns
      are `prompts`, `completion_ids` (tokens), `target`, and every column of the data. The column
      `answer` contains the target if the data has no column of this name. The argument
      `trainer_state` has `global_step` and `max_steps`. Without `**columns`, the function gets only
      the columns that are among its parameters.

    Plain functions and TRL-style functions may be async. `is_trl_style` tells TRL-style functions
    from plain functions.

    If a function returns `None` instead of a number, the completion cannot be scored. With
    `skips_none`, `None` means that the function does not apply to the completion. A completion with
    a reward of at least `success_at` is a success.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    success_at: float = 1.0
    conversational: bool | None = None
    """Whether a TRL function gets completions as lists of messages instead of text. None: if the
    prompt is a list of messages in the data, as in TRL."""
    skips_none: bool = False

    @property
    def quick(self) -> bool:
        return bool(getattr(self.function, "quick", False))

    @property
    def version(self) -> int:
        return int(getattr(self.function, "version", 1))

    @property
    def whole_groups(self) -> bool:
        """Whether the function scores a whole group in one call, as in TRL."""
        return is_trl_style(self.function)

    @property
    def is_async(self) -> bool:
        """Whether the function is async, so that several calls can wait at the same time."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object may be async too
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], call: Call = NO_CALL
    ) -> list[Score | None]:
        work = partial(self.score_group_async, prompt, texts, call)
        if not _in_event_loop():
            return asyncio.run(work())
        # In a notebook, this thread already runs an event loop, and a thread can have only one.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(lambda: asyncio.run(work())).result()

    async def score_group_async(
        self, prompt: Prompt, texts: Sequence[str], call: Call = NO_CALL
    ) -> list[Score | None]:
        if not self.whole_groups:
            given = [self.function(prompt, text, **self.options) for text in texts]
            results = [await r if inspect.isawaitable(r) else r for r in given]
        else:
            results = self.function(**self._arguments(prompt, texts, call))
            results = _listed(await results if inspect.isawaitable(results) else results)
        if len(results) != len(texts):
            raise ValueError(
                f"the function returned {len(results)} rewards for {len(texts)} completions"
            )
        return [self._score(result) for result in results]

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if a TRL function needs a data column that does not exist."""
        if not self.whole_groups:
            return
        given = self._arguments(prompt, [""], NO_CALL)
        for name, parameter in inspect.signature(self.function).parameters.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and name not in given:
                columns = ", ".join(sorted(self._columns(prompt, [""], NO_CALL)))
                why = f"the data has no column of this name; the columns are {columns}"
                if name in NOT_PASSED:
                    why = f"only TRL passes this argument; give it the default {name}=None"
                raise ConfigError(
                    f"reward: the function {_name(self.function)} needs the argument {name!r}, "
                    f"but {why}"
                )

    def _arguments(self, prompt: Prompt, texts: Sequence[str], call: Call) -> dict[str, Any]:
        """Return the columns and options that the function takes as parameters."""
        given = {**self._columns(prompt, texts, call), **self.options}
        parameters = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return given
        return {name: value for name, value in given.items() if name in parameters}

    def _columns(self, prompt: Prompt, texts: Sequence[str], call: Call) -> dict[str, Any]:
        """Return the keyword arguments that TRL would pass: one list per column."""
        completions: list[Any] = list(texts)
        messages: Any = prompt.text
        conversational = self.conversational
        if conversational is None:
            conversational = any(isinstance(value, list) for value in prompt.columns.values())
        if conversational:
            completions = [_messages(text) for text in texts]
            messages = [dict(message) for message in prompt.messages]
        usual = {"target": prompt.target, "answer": prompt.target}
        row = {**usual, **prompt.info, **prompt.columns, "prompts": messages}
        steps = max(1, call.max_steps)  # reward functions divide by max_steps
        # In evaluations, the run has ended.
        done = steps if call.global_step is None else call.global_step
        return {
            **{name: [value] * len(texts) for name, value in row.items()},
            "completions": completions,
            "completion_ids": [list(ids) for ids in call.completion_ids] or [[] for _ in texts],
            "trainer_state": TrainerState(global_step=done, max_steps=steps),
        }

    def _score(self, result: Any) -> Score | None:
        if result is None or isinstance(result, Score):
            return result
        parts: dict[str, float] = {}
        if isinstance(result, Mapping):
            parts = {str(name): float(value) for name, value in result.items()}
            result = sum(parts.values())
        try:
            reward = float(result)
        except (TypeError, ValueError):
            raise TypeError(f"the function returned {result!r:.60}, which is no number") from None
        return Score(reward=reward, success=reward >= self.success_at, parts=parts)


def _listed(results: Any) -> list[Any]:
    try:
        return list(results)
    except TypeError:
        what = f"the function returned {results!r:.60}"
        raise TypeError(f"{what}; it must return a list with a number per completion") from None


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _messages(text: str) -> list[Message]:
    """Return a completion as messages. For an episode, return all messages of all its turns."""
    episode = episode_of(text)
    return [{"role": "assistant", "content": text}] if episode is None else list(episode.reply)


def as_reward(function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Reward:
    """Turn a function or a class into a reward, and return an existing reward unchanged."""
    given = dict(options or {})
    reward: Any = function
    if inspect.isclass(function):
        reward, given = function(**given), {}
    if all(hasattr(reward, name) for name in ("bounds", "quick", "version")):
        return reward  # type: ignore[no-any-return]
    if not callable(reward):
        raise ConfigError(f"reward: {reward!r} must be a function that takes a prompt and a text")
    own = {k: given.pop(k) for k in ("success_at", "conversational") if k in given}
    if not is_trl_style(reward):
        try:
            inspect.signature(reward).bind(None, "", **given)
        except TypeError as error:
            raise _not_a_reward(reward, str(error)) from None
    return UserFunction(function=reward, options=given, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFunctions(_GroupReward):
    """The weighted sum of reward functions, each of which is recorded as a reward part.

    A completion is a success if the first function gives it a reward of at least 1. The functions
    run in the training process, as in TRL, so a function that hangs blocks the run.
    """

    functions: Mapping[str, UserFunction]
    weights: Mapping[str, float]
    skips_none: bool = False
    """If true, a function that returns None for a completion is left out of this completion's sum,
    as in TRL."""

    whole_groups: ClassVar[bool] = True

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], call: Call = NO_CALL
    ) -> list[Score | None]:
        columns = [f.score_group(prompt, texts, call) for f in self.functions.values()]
        return [self._total(row) for row in zip(*columns, strict=True)]

    def check(self, prompt: Prompt) -> None:
        for function in self.functions.values():
            function.check(prompt)

    def _total(self, row: Sequence[Score | None]) -> Score | None:
        scored = {name: s for name, s in zip(self.functions, row, strict=True) if s is not None}
        if not scored or (len(scored) < len(row) and not self.skips_none):
            return None
        total = math.fsum(self.weights[name] * score.reward for name, score in scored.items())
        parts = {name: score.reward for name, score in scored.items()}
        return Score(
            reward=total,
            success=next(iter(scored.values())).success,
            parts=parts,
            feedback="\n".join(score.feedback for score in scored.values() if score.feedback),
        )


def with_none(reward: Reward, none: str) -> Reward:
    """Return a user's reward that treats None according to the setting `scoring.none_rewards`."""
    if none == "skip" and isinstance(reward, UserFunction | WeightedFunctions):
        return replace(reward, skips_none=True)
    return reward


def own_name(reward: Reward) -> str:
    if isinstance(reward, WeightedFunctions):
        return "+".join(reward.functions)
    return type(reward).__name__


def check_columns(reward: Reward, prompt: Prompt) -> None:
    """Raise ConfigError if a user's reward needs a data column that does not exist."""
    if isinstance(reward, UserFunction | WeightedFunctions):
        reward.check(prompt)


def function_reward(
    rewards: Any, *, conversational: bool | None = None, success_at: float = 1.0
) -> Reward:
    """Make a reward from TRL-style functions: one, a list, {function: weight}, or weighted pairs.

    `conversational` says whether the functions get completions as lists of messages; None: if the
    prompts are lists of messages, as in TRL. An object that is already a reward, with `bounds`,
    `quick` and `version`, is returned unchanged.
    """
    if callable(rewards) and not isinstance(rewards, Mapping | Sequence):
        made = as_reward(rewards)
        if not isinstance(made, UserFunction):
            return made
        rewards = [rewards]
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise ConfigError(
            "rewards must be a function, a list of functions, or a dict of functions and weights, "
            f"not {rewards!r}; to choose a reward by its name, set reward.name"
        )
    pairs = weighted(rewards)
    if not pairs:
        raise ConfigError("rewards: give at least one reward function")
    functions: dict[str, UserFunction] = {}
    weights: dict[str, float] = {}
    for function, weight in pairs:
        given = {"conversational": conversational, "success_at": success_at}
        made = as_reward(function, given)
        if not isinstance(made, UserFunction):
            raise ConfigError(
                "rewards: a list may contain only functions; combine other rewards with `mix`"
            )
        name = _name(function)
        if name in functions:
            raise ConfigError(f"rewards: two functions have the name {name}; rename one of them")
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(
                f"rewards: the weight of {name} must be a finite number, not {weight}"
            )
        functions[name], weights[name] = made, float(weight)
    return WeightedFunctions(functions=functions, weights=weights)


def weighted(rewards: Any) -> list[tuple[RewardFunction, Any]]:
    """Return reward functions with their weights: of one function, a list, or a dict."""
    if callable(rewards):
        return [(rewards, 1.0)]
    listed = rewards.items() if isinstance(rewards, Mapping) else rewards
    return [each if isinstance(each, tuple) else (each, 1.0) for each in listed]


# The two kinds of reward functions, Covey's and TRL's, distinguished by their parameter names.

OWN = ("prompt", "text")
"""The names of the first two parameters of a function that scores one completion."""
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
"""Reward-function arguments that TRL passes, but Covey does not."""


def is_trl_style(function: Callable[..., Any]) -> bool:
    """Return whether a function scores a list of completions, as in TRL, and not one completion.

    A function with one of TRL's parameter names is a TRL function, because TRL passes every
    argument by name. A function with `**kwargs` is also a TRL function if its other parameters are
    columns of the data. Raises ConfigError if the parameter names fit neither a TRL function nor a
    plain function.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise _not_a_reward(function, "its parameters are unknown") from None
    # How many of the first two positional parameters have a name in `OWN`, or `_`.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [name.strip("_") for name, p in parameters.items() if p.kind in positional]
    own = sum(name in ("", wanted) for name, wanted in zip(given, OWN, strict=False))
    theirs = bool(parameters.keys() & TRL)
    kinds = {p.kind for p in parameters.values()}
    columns = inspect.Parameter.VAR_KEYWORD in kinds
    if "completions" in parameters or (theirs and own < len(OWN)):
        return True
    if not own and columns and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return True
    if (own == len(OWN) and not theirs) or (own == 1 and not columns):
        return False
    raise _not_a_reward(function, "the names of its parameters do not say which kind it is")


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _not_a_reward(function: Callable[..., Any], why: str) -> ConfigError:
    return ConfigError(
        f"reward: {_name(function)} is not a reward function ({why}); define f(prompt, text) to "
        "score one completion, or, as in TRL, f(completions, **columns) to score all completions "
        "of a prompt"
    )
