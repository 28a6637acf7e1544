"""The tool-call reward, for a call of the correct tool with the correct arguments."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from covey.rewards.score import Score, TargetReward, check_option
from covey.rewards.text import after_thinking, nesting, tag_contents
from covey.types import Prompt

MAX_CHARACTERS = 10_000
MAX_NESTING = 50
_CALL = re.compile(r"[A-Za-z_][\w.]*\s*\(.*\)", re.DOTALL)
_ARGUMENTS = ("arguments", "args", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A parsed tool call: the name of the tool, and the arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    """Arguments given without a name."""


def parse_call(text: str) -> Call | None:
    """Parse a text that is exactly one tool call, or return None for any other text.

    A call is `{"name": ..., "arguments": {...}}` or `name(key=value, ...)` with literal values. The
    call may be inside `<tool_call>` tags. The key `arguments` may also be called `args` or
    `parameters`. The arguments may be a JSON string.

    >>> parse_call('<tool_call>get_weather(city="Paris", days=3)</tool_call>').arguments
    {'city': 'Paris', 'days': 3}
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS or not text.endswith((")", "}", "</tool_call>")):
        return None
    if text.startswith("<tool_call>") and text.endswith("</tool_call>"):
        text = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    if nesting(text) > MAX_NESTING:
        return None
    if not text.startswith("{"):
        return _from_syntax(text)
    try:
        return _from_object(json.loads(text, object_pairs_hook=_each_key_once))
    except (ValueError, RecursionError):
        return None


def only_call(text: str) -> Call | None:
    """Return the tool call after the thinking, or None if there is no call or more than one."""
    rest = after_thinking(text)
    tags = rest.count("<tool_call>")
    calls = tag_contents(rest, "tool_call") if tags else [rest]
    return parse_call(calls[0]) if calls and tags <= 1 else None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject a repeated JSON key, because parsers disagree on which value to use."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def _from_object(value: Mapping[str, Any]) -> Call | None:
    given = [value[key] for key in _ARGUMENTS if key in value]
    arguments = given[0] if given else {}
    if isinstance(arguments, str) and nesting(arguments) <= MAX_NESTING:
        try:
            arguments = json.loads(arguments, object_pairs_hook=_each_key_once)
        except ValueError:
            return None
    name = value.get("name")
    if len(given) > 1 or not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    return Call(name=name, arguments=arguments)


def _as_written(text: str, call: ast.Call) -> bool:
    """Return whether all names in a parsed call are spelled as in the text.

    In names, Python's parser replaces variants of letters, such as full-width letters, by ordinary
    letters.
    """
    names = [(call.func, ast.unparse(call.func)), *((k, str(k.arg)) for k in call.keywords)]
    return all((ast.get_source_segment(text, n) or "").startswith(name) for n, name in names)


def _from_syntax(text: str) -> Call | None:
    if not _CALL.fullmatch(text):
        return None
    try:
        with warnings.catch_warnings():
            # The parser warns about escapes such as \\d in strings.
            warnings.simplefilter("ignore")
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        keys = [keyword.arg for keyword in call.keywords]
        values = [ast.literal_eval(keyword.value) for keyword in call.keywords]
        positional = tuple(ast.literal_eval(value) for value in call.args)
        name = ast.unparse(call.func)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    if None in keys or len(set(keys)) < len(keys) or not re.fullmatch(r"[\w.]+", name):
        return None
    if not text.isascii() and not _as_written(text, call):
        return None
    arguments = {str(key): value for key, value in zip(keys, values, strict=True)}
    return Call(name=name, arguments=arguments, positional=positional)


def same_value(given: Any, expected: Any) -> bool:
    """Return whether two values are equal as JSON values.

    3 equals 3.0 but not "3", and true does not equal 1. Whitespace around strings is ignored.

    >>> same_value({"a": [3.0, " x"]}, {"a": [3, "x"]}), same_value("3", 3), same_value(True, 1)
    (True, False, False)
    """
    if isinstance(given, str) and isinstance(expected, str):
        return given.strip() == expected.strip()
    if isinstance(given, Mapping) and isinstance(expected, Mapping):
        return given.keys() == expected.keys() and all(
            same_value(given[key], expected[key]) for key in expected
        )
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(given, complex):
        return False
    return bool(isinstance(given, bool) == isinstance(expected, bool) and given == expected)


def _named(call: Call, order: Sequence[str]) -> Mapping[str, Any] | None:
    """Return a call's arguments by name, or None if a positional argument has no name or a name
    repeats."""
    names = order[: len(call.positional)]
    if len(names) < len(call.positional) or set(names) & set(call.arguments):
        return None
    return {**dict(zip(names, call.positional, strict=True)), **call.arguments}


def target_call(prompt: Prompt) -> Call | None:
    """Return the expected call: the object or text in `info["call"]`, or else the target."""
    given = prompt.info.get("call", prompt.target)
    return _from_object(given) if isinstance(given, Mapping) else parse_call(str(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(TargetReward):
    """The correct tool earns `tool` points, and correct arguments earn `1 - tool` points.

    Arguments earn points only if the call names the correct tool. If arguments of a wrong tool
    counted, a call without arguments would earn points whenever the expected call has no arguments.
    A completion with several tool calls, or with a call that cannot be parsed, scores 0, so that
    calling every tool earns no reward. With `partial`, the score of the arguments is the fraction
    of correct arguments among all given or expected arguments. Without `partial`, all arguments
    must be correct.

    The expected call is `prompt.info["call"]` (an object or text), or else `prompt.target`.
    Positional arguments get the names in `prompt.info["parameters"]`, in order. Without
    `prompt.info["parameters"]`, positional arguments must equal the positional arguments of the
    expected call.
    """

    tool: float = 0.5
    partial: bool = False

    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        TargetReward.__post_init__(self)
        check_option(0 <= self.tool <= 1, f"tool = {self.tool} must be between 0 and 1")

    def __call__(self, prompt: Prompt, text: str) -> Score:
        expected = target_call(prompt)
        if expected is None:
            return self.neutral(
                f"prompt {prompt.id!r} has no expected call: give one in info['call'] or as target",
                ("name", "arguments"),
            )
        call = only_call(text)
        named = call is not None and call.name == expected.name
        share = 0.0
        if call is not None and named:
            share = self._share(call, expected, tuple(prompt.info.get("parameters", ())))
        return Score(
            reward=self.tool * named + (1 - self.tool) * share,
            success=share == 1.0,
            parts={"name": float(named), "arguments": share},
            attempted=call is not None,
        )

    def _share(self, call: Call, expected: Call, order: Sequence[str]) -> float:
        given, wanted = _named(call, order), _named(expected, order)
        if wanted is None:
            both = [(c.positional, c.arguments) for c in (call, expected)]
            return float(same_value(*both))
        if given is None:
            return 0.0
        keys = given.keys() | wanted.keys()
        correct = sum(
            key in given and key in wanted and same_value(given[key], wanted[key]) for key in keys
        )
        share = correct / len(keys) if keys else 1.0
        return share if self.partial or share == 1.0 else 0.0
