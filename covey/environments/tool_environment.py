"""Defines tools that the policy can call, where each tool is a method of a Python class.

Covey derives the JSON schema of a tool from the type hints and the docstring of its method.

class Shop(ToolEnvironment):
    def price(self, item: str) -> float:
        '''Return the price of an item.

        Args:
            item: Its name.
        '''
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from covey.docstrings import described_arguments
from covey.environments.environment import Start, Step
from covey.trust import import_callable
from covey.types import Message, Prompt

Tool = Callable[..., Any]


class ToolError(Exception):
    """Raised by a tool to reject a call.

    The policy sees the error message, and the episode continues.
    """


def tool_schema(name: str, tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool, in the format that chat templates expect."""
    doc = inspect.getdoc(tool) or ""
    schema = _arguments(name, tool).model_json_schema()
    properties = {
        key: {k: v for k, v in value.items() if k != "title"}
        for key, value in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties}
    if schema.get("required"):
        parameters["required"] = schema["required"]
    if schema.get("$defs"):
        parameters["$defs"] = schema["$defs"]
    description = re.split(r"\n\s*(?:Args|Returns|Raises):", doc)[0].strip()
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _arguments(name: str, tool: Tool) -> Any:
    hints = typing.get_type_hints(tool)
    described = described_arguments(inspect.getdoc(tool) or "")
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: *{key} has no schema; name every parameter")
        if key not in hints:
            raise TypeError(f"tool {name}: parameter {key} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        info: FieldInfo = Field(default, description=described.get(key))
        fields[key] = (hints[key], info)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def checked_arguments(name: str, tool: Tool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated arguments of a tool call; raise ToolError for invalid arguments."""
    model = _arguments(name, tool)
    if given.keys() == {""}:  # in the format `tags`, the only argument has no name
        given = dict.fromkeys(list(model.model_fields)[:1], given[""])
    try:
        values = model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ToolError(f"{name}: {where}: {first['msg']}") from None
    return {key: getattr(values, key) for key in model.model_fields}


async def tool_message(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> Message:
    """Run a tool call, and return its result or its error as a message with the role `tool`."""
    function = call["function"]
    name, given = function["name"], function["arguments"]
    try:
        if "error" in call:
            raise ToolError(call["error"])
        if name not in tools:
            raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
        result = tools[name](**checked_arguments(name, tools[name], given))
        content = as_text(await result if inspect.isawaitable(result) else result)
    except ToolError as error:
        content = f"error: {error}"
    except Exception as error:  # a tool may raise any error, and the policy can learn from it
        content = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "name": name, "content": content}


def as_text(result: Any) -> str:
    """Return a tool's result as text for the policy, as JSON if the result is not a text."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def tools_of(owner: Any, without: Sequence[str] = ()) -> dict[str, Tool]:
    """Return an object's tools: the public methods of its class, in the order of definition."""
    names = [
        name
        for kind in reversed(type(owner).__mro__[:-1])
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_") and name not in without
    ]
    return {name: getattr(owner, name) for name in dict.fromkeys(names)}


class ToolEnvironment:
    """Base class of environments with tools, which are the public methods of a subclass.

    A message without tool calls ends the episode. The policy sees an exception in a tool as an
    error message. A subclass can override `reset` to prepare an episode, and define `reward` to
    score an episode.
    """

    RESERVED = ("reset", "step", "reward", "tools")

    def tools(self) -> dict[str, Tool]:
        """Return a dict that maps the name of each tool to the tool."""
        return tools_of(self, without=self.RESERVED)

    def reset(self, prompt: Prompt, seed: int) -> Start:
        """Start the episode: show the prompt and the tools."""
        schemas = [tool_schema(name, tool) for name, tool in self.tools().items()]
        return Start(messages=prompt.messages, tools=schemas)

    async def step(self, message: Message) -> Step:
        """Run the tool calls of a message in order; without tool calls, the episode ends."""
        tools = self.tools()
        calls = message.get("tool_calls", ())
        return Step(messages=[await tool_message(tools, c) for c in calls], done=not calls)


class Tools(ToolEnvironment):
    """Your own functions as tools, as the argument `tools` of TRL's trainer.

    `functions` lists import paths, such as "my_tools:search". Functions need type hints, and their
    docstrings describe them to the policy.
    """

    @staticmethod
    def prepare(functions: Sequence[str]) -> None:
        """Import the modules when a process starts, because that may take long."""
        for path in functions:
            import_callable(path, "environment.functions")

    def __init__(self, *, functions: Sequence[str]) -> None:
        found = [import_callable(path, "environment.functions") for path in functions]
        self._functions = {
            path.rpartition(":")[2]: f for path, f in zip(functions, found, strict=True)
        }

    def tools(self) -> dict[str, Tool]:
        """Return the functions by name."""
        return self._functions
