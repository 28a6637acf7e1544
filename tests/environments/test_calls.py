"""Reading calls of tools from the policy's text, and the stops that end them."""

from __future__ import annotations

from typing import Any

import pytest

from covey.environments.calls import CALL_FORMATS, assistant_message

TOOLS = {"f": {}, "g": {}}


def read(form: str, text: str) -> list[Any]:
    """Return each call as name and arguments, or its error."""
    message = assistant_message(text, CALL_FORMATS[form], TOOLS)
    assert message["content"] == text
    return [
        call["error"]
        if "error" in call
        else (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", "no call", []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            [("f", {"a": 1})],
        ),
        (
            "hermes",
            'I do.\n<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>\n'
            '<tool_call>{"name": "g"}</tool_call>',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("hermes", "<think><tool_call>{}</tool_call></think>done", []),
        ("hermes", '<tool_call>{"name": "f"}', ["the call has no </tool_call>"]),
        (
            "hermes",
            "<tool_call>[1]</tool_call>",
            ["a call is an object with a name and arguments"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            ["the arguments are not an object"],
        ),
        (
            "hermes",
            "<tool_call>" + "[" * 99_999 + "</tool_call>",
            ["the call is nested too deeply"],
        ),
        (
            "hermes",
            "<tool_call>" + " " * 100_001 + "</tool_call>",
            ["the call is longer than 100000 characters"],
        ),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [("f", {}), ("g", {})],
        ),
        ("llama3", '{"name": "f"} and so on', [("f", {}), "text follows the call"]),
        ("llama3", "The answer is {}.", []),
        ("tags", "<f>1+1</f><g>x</g><h>y</h>", [("f", {"": "1+1"}), ("g", {"": "x"})]),
        ("tags", "<f>1+1", ["the call of f has no </f>"]),
    ],
)
def test_calls_are_read_or_say_why_not(form: str, text: str, calls: list[Any]) -> None:
    found = read(form, text)
    assert [c if not isinstance(c, str) else c.partition(": ")[0] for c in found] == calls


def test_a_call_that_is_not_json_says_where() -> None:
    (error,) = read("hermes", "<tool_call>{name: f}</tool_call>")
    assert error.startswith("the call is not JSON: Expecting property name")


def test_stops_are_where_a_call_ends() -> None:
    stops = {name: form.stops(TOOLS) for name, form in CALL_FORMATS.items()}
    tagged = {name: ["</tool_call>"] for name in ("hermes", "qwen3_coder", "glm45")}
    none: dict[str, list[str]] = {name: [] for name in ("llama3", "mistral", "glm4", "gpt_oss")}
    deepseek = ["<｜tool▁call▁end｜>"]  # noqa: RUF001 - as the token is written
    assert stops == {**tagged, **none, "deepseek": deepseek, "tags": ["</f>", "</g>"]}
