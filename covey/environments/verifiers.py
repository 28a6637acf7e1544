"""Runs unmodified environment packages of the `verifiers` library, version 0.1.

An environment package has a function `load_environment()` and its own rollout loop, which Covey
runs. When the rollout loop calls the model, the policy generates the next turn. The package's
rubric computes the reward. The task `verifiers` turns the rows of the package's dataset into
prompts. Covey does not support rubrics that score a whole group, environments that change earlier
messages, images, and tasksets of verifiers 0.2 and later.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from covey.environments.environment import Start, Step
from covey.errors import ConfigError
from covey.trust import import_callable
from covey.types import Message, Prompt

ROW = "row"
"""The key under which a prompt's `info` stores the prompt's row of the package's dataset."""


@cache
def _loaded(package: str, arguments: str) -> Any:
    """Load an environment package once in each process, for all episodes."""
    load = import_callable(f"{package.replace('-', '_')}:load_environment", "environment.package")
    environment = load(**json.loads(arguments))
    rubric = getattr(environment, "rubric", None)
    group: list[Any] = getattr(rubric, "_get_group_reward_funcs", list)()
    if group:
        function = group[0].__name__
        raise ConfigError(
            f"environment: the function {function} in the rubric of {package} scores whole groups, "
            "which Covey does not support"
        )
    return environment


def load(package: str, arguments: Mapping[str, Any]) -> Any:
    """Return the environment that a package's `load_environment` makes from the arguments."""
    return _loaded(package, json.dumps(dict(arguments), sort_keys=True))


class Verifiers:
    """One episode in an environment of the `verifiers` library."""

    @staticmethod
    def prepare(package: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Load the package in the main thread, because some packages require the main thread."""
        load(package, arguments or {})

    def __init__(self, package: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._environment = load(package, arguments or {})
        self._asked: asyncio.Queue[Sequence[Any] | None] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._known: list[Message] = []
        self._tools: Any = None

    async def reset(self, prompt: Prompt, seed: int) -> Start:
        """Start the package's rollout, and wait until the rollout needs a model response."""
        plain = {
            "prompt": [dict(message) for message in prompt.messages],
            "answer": prompt.target,
            "info": dict(prompt.info),
            "example_id": 0,
        }
        row = dict(prompt.info.get(ROW, plain))
        run = self._environment.rollout(row, client=self._client(), model="covey")
        self._rollout = asyncio.ensure_future(run)
        self._rollout.add_done_callback(lambda _: self._asked.put_nowait(None))
        messages = await self._next()
        if messages is None:
            raise RuntimeError("the rollout ended before the first response")
        self._known = messages
        names = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: getattr(tool, name) for name in names}}
            for tool in self._tools or ()
        ]
        return Start(messages=messages, tools=tools)

    async def step(self, message: Message) -> Step:
        """Pass the policy's message to the package, and return the package's next messages."""
        await self._answers.put(message)
        messages = await self._next()
        if messages is None:
            return Step(done=True)
        size = len(self._known)
        if messages[:size] != self._known or messages[size]["role"] != "assistant":
            raise RuntimeError("the environment changes earlier messages, which is not supported")
        self._known = messages
        return Step(messages=messages[size + 1 :])

    async def reward(self) -> dict[str, float]:
        """Let the package's rollout finish, and score the rollout with the package's rubric."""
        assert self._rollout is not None
        await self._answers.put(None)
        state = await self._rollout
        error = state.get("error")
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}")
        await self._environment.rubric.score_rollout(state)
        return {"rubric": float(state["reward"])}

    async def _next(self) -> list[Message] | None:
        """Wait for the package's next call of the model; return None if the rollout has ended."""
        asked = await self._asked.get()
        if asked is not None:
            return [_message(message) for message in asked]
        assert self._rollout is not None
        if self._rollout.exception() is not None:
            raise self._rollout.exception()  # type: ignore[misc]
        return None

    def _client(self) -> Any:
        """Return a `verifiers` client that gets its responses from the policy."""
        clients, errors, types = (
            importlib.import_module(f"verifiers.{name}") for name in ("clients", "errors", "types")
        )
        outer = self

        class Policy(clients.Client):  # type: ignore[misc, name-defined]
            async def get_response(self, prompt: Any, *_: Any, **given: Any) -> Any:
                outer._tools = given.get("tools")
                outer._asked.put_nowait(prompt)
                message = await outer._answers.get()
                if message is None:  # one of Covey's limits ended the episode
                    raise errors.OverlongPromptError("the episode has ended")
                calls = [
                    types.ToolCall(id=f"call_{number}", **_call(call))
                    for number, call in enumerate(message.get("tool_calls", ()))
                ]
                answer = types.ResponseMessage(
                    content=message["content"], tool_calls=calls or None, finish_reason="stop",
                    is_truncated=False,
                )  # fmt: skip
                return types.Response(id="covey", created=0, model="covey", message=answer)

        Policy.__abstractmethods__ = frozenset()
        return Policy(None)


def _call(call: Mapping[str, Any]) -> dict[str, str]:
    function = call["function"]
    if "error" in call:  # the arguments are not JSON, and the package reports this error
        return {"name": function["name"], "arguments": call["error"]}
    return {"name": function["name"], "arguments": json.dumps(function["arguments"])}


def _message(message: Any) -> Message:
    data = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    content = data.get("content") or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise TypeError("a message has images or sound, which is not supported")
        content = "".join(part["text"] for part in parts)
    known = {"role": str(data["role"]), "content": content}
    return known if "name" not in data else {**known, "name": str(data["name"])}
