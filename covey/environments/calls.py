"""Defines tool-call formats: how models write tool calls in text, and how Covey parses them.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and most others do
    llama3   a message that is {"name": ..., "parameters": {...}}, several separated by ;
    tags     <name>argument</name>, for tools that take one text

A tool call that cannot be parsed has an `error` instead of arguments. The environment shows the
error to the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.types import Message

Call = dict[str, Any]
LONGEST = 100_000
"""Maximum number of characters in a tool call. A tool call with more than LONGEST characters gets
an error instead of being parsed."""
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THINKING = re.compile(r"\A\s*(?:<think>)?.*?</think>", re.DOTALL)


def call_of(name: str, arguments: Mapping[str, Any]) -> Call:
    """Return a tool call in the format that chat templates expect."""
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def unreadable(text: str, error: str) -> Call:
    """Return a placeholder for a tool call that could not be parsed, with the error."""
    return {**call_of("", {}), "error": error, "text": text[:200]}


def hermes_calls(text: str, tools: Sequence[str]) -> list[Call]:
    """Parse the tool calls between `<tool_call>` and `</tool_call>`."""
    found = _HERMES.findall(text)
    return [
        _json_call(body) if end else unreadable(body, "the call has no </tool_call>")
        for body, end in found
    ]


def llama3_calls(text: str, tools: Sequence[str]) -> list[Call]:
    """Parse Llama 3 tool calls, which are messages of one or more JSON objects and nothing else."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return [*calls, _json_call(body)]
        calls.append(_json_call(body[:end]))
        body = body[end:].lstrip("; \n\t\r,")
        if body and not body.startswith("{"):
            return [*calls, unreadable(body, "text follows the call")]
    return calls


def tag_calls(text: str, tools: Sequence[str]) -> list[Call]:
    """Parse tool calls of the form `<name>argument</name>`, where `name` is the name of a tool."""
    if not tools:
        return []
    names = "|".join(map(re.escape, tools))
    return [
        call_of(name, {"": body})
        if end
        else unreadable(body, f"the call of {name} has no </{name}>")
        for name, body, end in re.findall(rf"<({names})>(.*?)(</\1>|\Z)", text, re.DOTALL)
    ]


def _json_call(body: str) -> Call:
    if len(body) > LONGEST:
        return unreadable(body, f"the call is longer than {LONGEST} characters")
    try:
        value = json.loads(body)
    except ValueError as error:
        return unreadable(body, f"the call is not JSON: {error}")
    except RecursionError:
        return unreadable(body, "the call is nested too deeply")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return unreadable(body, "a call is an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return unreadable(body, "the arguments are not JSON")
    if not isinstance(arguments, dict):
        return unreadable(body, "the arguments are not an object")
    return call_of(name, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls."""

    read: Callable[[str, Sequence[str]], list[Call]]
    """A function that parses the tool calls in a text, given the names of the tools."""
    stops: Callable[[Sequence[str]], list[str]]
    """A function that returns the stop strings of tool calls, given the names of the tools."""
    instruction: str
    """Instructions for models whose chat template does not support tools. Covey replaces the
    placeholder `{tools}` with the JSON schemas of the tools."""


_JSON_INSTRUCTION = (
    "You can call tools. Each is described by a JSON schema between <tools> and </tools>:\n"
    "<tools>\n{tools}\n</tools>\n\n"
)
CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(
            read=hermes_calls,
            stops=lambda tools: ["</tool_call>"],
            instruction=_JSON_INSTRUCTION + "To call a tool, write its name and arguments as JSON:"
            '\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>',
        ),
        "llama3": CallFormat(
            read=llama3_calls,
            stops=lambda tools: [],
            instruction=_JSON_INSTRUCTION + "To call a tool, answer with nothing but JSON:\n"
            '{{"name": <name>, "parameters": <arguments>}}',
        ),
        "tags": CallFormat(
            read=tag_calls,
            stops=lambda tools: [f"</{name}>" for name in tools],
            instruction="",
        ),
    }
)


def assistant_message(text: str, call_format: CallFormat, tools: Sequence[str]) -> Message:
    """Return the policy's text as a chat message, with the tool calls found in the text."""
    calls = call_format.read(_THINKING.sub("", text, count=1), tools)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": calls} if calls else message
