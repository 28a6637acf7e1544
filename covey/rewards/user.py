"""Rewards of the user's own: any plain, async or TRL-style function."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from covey.errors import ConfigError
from covey.rewards.score import Reward, Score
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function in the dress of a reward.

    plain   `f(prompt, text)` or `async f(prompt, text)`: a number, a `Score`, or a mapping of parts
            whose sum is the reward
    TRL     `f(completions, **columns)`, async or not: a list of numbers. It is called once for a
            group, with `prompts`, `answer` and everything in the prompt's `info` as lists beside.

    `None` in place of a number means that the answer cannot be judged. A number alone does not say
    whether the answer is right: it counts as right from `success_at` on.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    success_at: float = 1.0
    conversational: bool = False
    """Give a TRL function its completions as lists of messages rather than as text."""

    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    @property
    def quick(self) -> bool:
        """The function's own `quick`, if it has one."""
        return bool(getattr(self.function, "quick", False))

    @property
    def version(self) -> int:
        """The function's own `version`, if it has one."""
        return int(getattr(self.function, "version", 1))

    @property
    def whole_groups(self) -> bool:
        """Whether the function judges several answers in one call, as TRL's do."""
        return "completions" in inspect.signature(self.function).parameters

    @property
    def is_async(self) -> bool:
        """Whether calls can wait for each other's answers side by side."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object may be async too
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        (score,) = self.judge(prompt, [text])
        if score is None:
            raise ValueError("the function gave None")
        return score

    def judge(self, prompt: Prompt, texts: Sequence[str]) -> list[Score | None]:
        """Judge answers to one prompt; None for one that cannot be judged."""
        return asyncio.run(self.judge_async(prompt, texts))

    async def judge_async(self, prompt: Prompt, texts: Sequence[str]) -> list[Score | None]:
        """Judge answers to one prompt; an async function is awaited."""
        if not self.whole_groups:
            given = [self.function(prompt, text, **self.options) for text in texts]
            results = [await r if inspect.isawaitable(r) else r for r in given]
        else:
            results = self.function(**self._columns(prompt, texts), **self.options)
            results = list(await results if inspect.isawaitable(results) else results)
        if len(results) != len(texts):
            raise ValueError(f"the function gave {len(results)} rewards for {len(texts)} answers")
        return [self._score(result) for result in results]

    def _columns(self, prompt: Prompt, texts: Sequence[str]) -> dict[str, list[Any]]:
        """Return what TRL would call the function with: one list an argument."""
        completions: list[Any] = list(texts)
        asked: Any = prompt.text
        if self.conversational:
            completions = [[{"role": "assistant", "content": text}] for text in texts]
            asked = [dict(message) for message in prompt.messages]
        row = {"answer": prompt.target, **prompt.info, "prompts": asked}
        return {**{name: [value] * len(texts) for name, value in row.items()},
                "completions": completions}  # fmt: skip

    def _score(self, result: Any) -> Score | None:
        if result is None or isinstance(result, Score):
            return result
        parts: dict[str, float] = {}
        if isinstance(result, Mapping):
            parts = {str(name): float(value) for name, value in result.items()}
            result = sum(parts.values())
        reward = float(result)
        return Score(reward=reward, success=reward >= self.success_at, parts=parts)


def as_reward(function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Reward:
    """Dress any function, or make an object of any class, as a reward; rewards stay themselves."""
    given = dict(options or {})
    judge: Any = function
    if inspect.isclass(function):
        judge, given = function(**given), {}
    if all(hasattr(judge, name) for name in ("bounds", "quick", "version")):
        return judge  # type: ignore[no-any-return]
    if not callable(judge):
        raise ConfigError(f"reward: {judge!r} cannot be called with a prompt and a text")
    _check_signature(judge)
    own = {k: given.pop(k) for k in ("success_at", "conversational") if k in given}
    return UserFunction(function=judge, options=given, **own)


def _check_signature(function: Callable[..., Any]) -> None:
    """Refuse what was not written as a reward before it is called with anything."""
    try:
        signature = inspect.signature(function)
        if "completions" not in signature.parameters:
            signature.bind_partial(None, "")
    except (TypeError, ValueError):
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"reward: {name} takes neither a prompt and a text nor completions, so it is no reward"
        ) from None
