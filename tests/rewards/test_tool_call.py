from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.rewards.registry import make_reward, reward_options
from covey.rewards.tool_call import Call, ToolCall, only_call, parse_call, same_value
from covey.types import Prompt

WEATHER = Call(name="get_weather", arguments={"city": "Paris", "days": 3})
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'


def prompt(answer: str = "", **info: Any) -> Prompt:
    return Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target=answer, info=info
    )


def reward_of(text: str, answer: str = JSON, **options: Any) -> float:
    return ToolCall(**options)(prompt(answer), text).reward


SAME = [
    JSON,
    f"<tool_call>{JSON}</tool_call>",
    f"<tool_call>\n{JSON}\n</tool_call>\n",
    '{"name": "get_weather", "args": {"days": 3, "city": "Paris"}}',
    '{"parameters": {"days": 3, "city": "Paris"}, "name": "get_weather"}',
    r'{"name": "get_weather", "arguments": "{\"city\": \"Paris\", \"days\": 3}"}',
    'get_weather(city="Paris", days=3)',
    "get_weather( days=3, city='Paris' )",
    "<tool_call>get_weather(city='Paris', days=3)</tool_call>",
]
NO_CALLS = {
    "empty": "",
    "words": "get the weather",
    "no brackets": "get_weather",
    "list": "[1]",
    "no name": '{"arguments": {}}',
    "name of another type": '{"name": 3, "arguments": {}}',
    "arguments of another type": '{"name": "f", "arguments": [1]}',
    "arguments as broken text": '{"name": "f", "arguments": "{"}',
    "arguments twice": '{"name": "f", "arguments": {}, "args": {}}',
    "broken object": '{"name": "f"',
    "variable": "f(x)",
    "computed": "f(2**99)",
    "nested call": "f(g(1))",
    "call of a call": "f(1)(2)",
    "spread": "f(*[1], **{})",
    "key twice": "f(a=1, a=2)",
    "two calls": "f(); g()",
    "sum of calls": "f() + g(1)",
    "lambda": "(lambda: 1)()",
    "unhashable": "f(a={[]: 1})",
    "unfinished": "f(a=1",
    "many brackets": "f(" + "[" * 5000 + "]" * 5000 + ")",
    "deep": "f(" + "[" * 60 + "]" * 60 + ")",
    "many signs": "f(" + "-" * 9000 + "1)",
    "long": "f('" + "x" * 10_000 + "')",
    "deep object": '{"name": "f", "arguments": ' + '{"a":' * 60 + "1" + "}" * 61,
    "deep text": '{"name": "f", "arguments": "' + "\\u005b" * 1500 + '"}',
    "long name": "a." * 4000 + "b()",
    "huge number": "f(" + "9" * 9000 + ")",
    "nul": "f('\x00')",
    "nul in between": "f(\x00)",
    "surrogate": "f(\ud800)",
}


@pytest.mark.parametrize("text", SAME)
def test_a_call_is_the_same_in_every_form(text: str) -> None:
    assert parse_call(text) == WEATHER
    assert reward_of(text) == 1.0
    assert reward_of(JSON, answer=text) == 1.0


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_none_at_once(text: str) -> None:
    start = time.thread_time()
    assert parse_call(text) is None
    assert time.thread_time() - start < 0.2
    assert reward_of(text) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\uff47et_weather(city='Paris', days=3)",
        "get_\uff57eather(city='Paris', days=3)",
        "get_weather(\uff43ity='Paris', days=3)",
        "get_weather(city='Paris', \U0001d41days=3)",
        "get_weather(city='\uff30aris', days=3)",
        "get_we\u0430ther(city='Paris', days=3)",
        '{"name": "\uff47et_weather", "arguments": {"city": "Paris", "days": 3}}',
        '{"name": "get_weather", "arguments": {"\uff43ity": "Paris", "days": 3}}',
        '{"name": " get_weather", "arguments": {"city": "Paris", "days": 3}}',
        '{"name": "Get_weather", "arguments": {"city": "Paris", "days": 3}}',
    ],
)
def test_names_are_taken_as_they_are_written(text: str) -> None:
    assert not ToolCall()(prompt(JSON), text).success


def test_a_name_in_another_script_is_a_name() -> None:
    asked = prompt("wetter_fürs(stadt='Köln')")
    assert ToolCall()(asked, "wetter_fürs(\n  stadt='Köln')").success


def test_escapes_in_strings_give_no_warnings() -> None:
    assert parse_call(r"find(pattern='\d+')") == Call(name="find", arguments={"pattern": r"\d+"})


def test_arguments_without_names_are_kept() -> None:
    assert parse_call("f(1, 'a', b=None)") == Call(
        name="f", arguments={"b": None}, positional=(1, "a")
    )


def test_only_one_call_after_the_thinking_counts() -> None:
    text = "<think><tool_call>a()</tool_call></think><tool_call>b()</tool_call>"
    assert only_call(text) == only_call("<think>a()</think> b()") == Call(name="b")
    assert only_call(text + "<tool_call>c()</tool_call>") is None
    assert only_call("<think><tool_call>a()</tool_call>") is None
    assert only_call("so: a()") is None


@pytest.mark.parametrize(
    ("text", "reward", "partial"),
    [
        ("get_weather(city='Paris', days=3)", 1.0, 1.0),
        ("get_weather(city=' Paris ', days=3.0)", 1.0, 1.0),
        ("get_weather(city='Paris', days=4)", 0.5, 0.75),
        ("get_weather(city='Paris', days='3')", 0.5, 0.75),
        ("get_weather(city='Paris')", 0.5, 0.75),
        ("get_weather(city='Paris', days=3, hours=1)", 0.5, 0.5 + 1 / 3),
        ("get_weather(city='Rome', days=4)", 0.5, 0.5),
        ("get_weather()", 0.5, 0.5),
        ("get_weather('Paris', 3)", 0.5, 0.5),
        ("get_news(city='Paris', days=3)", 0.0, 0.0),
        ("Get_weather(city='Paris', days=3)", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<think>get_weather(city='Paris', days=3)</think>", 0.0, 0.0),
    ],
)
def test_the_tool_is_half_and_its_arguments_the_other_half(
    text: str, reward: float, partial: float
) -> None:
    assert reward_of(text) == reward
    assert reward_of(text, partial=True) == pytest.approx(partial)
    score = ToolCall()(prompt(JSON), text)
    assert score.success == (reward == 1.0)
    assert score.parts == {"name": float(reward > 0), "arguments": float(reward == 1.0)}


def test_empty_arguments_are_correct_only_with_the_correct_tool() -> None:
    assert reward_of("now()", answer="now()") == 1.0
    assert reward_of("other()", answer="now()") == 0.0


def test_more_than_one_call_gains_nothing() -> None:
    tagged = f"<tool_call>{JSON}</tool_call>"
    assert reward_of(f"Let me look. {tagged}") == 1.0
    assert reward_of(tagged * 2) == 0.0
    assert reward_of(tagged + "<tool_call>other()</tool_call>") == 0.0
    assert reward_of(tagged + "<tool_call>") == 0.0
    assert reward_of("<tool_call>junk</tool_call>" + tagged) == 0.0
    assert reward_of(f"<think>{tagged}</think>{tagged}") == 1.0


def test_the_order_of_parameters_gives_names_to_arguments() -> None:
    asked = prompt(JSON, parameters=["city", "days"])
    assert ToolCall()(asked, "get_weather('Paris', 3)").reward == 1.0
    assert ToolCall()(asked, "get_weather('Paris', days=3)").reward == 1.0
    assert ToolCall()(asked, "get_weather(3, 'Paris')").reward == 0.5
    assert ToolCall()(asked, "get_weather('Paris', 3, 4)").reward == 0.5
    assert ToolCall()(asked, "get_weather('Paris', 3, city='Paris')").reward == 0.5
    assert reward_of("f(1.0, 2)", answer="f(1, 2)") == 1.0
    assert reward_of("f(2, 1)", answer="f(1, 2)") == 0.5


def test_the_expected_call_comes_from_the_info_or_else_the_target() -> None:
    given_call = {"name": "now", "arguments": {"zone": "UTC"}}
    for call in (given_call, "now(zone='UTC')"):
        assert ToolCall()(prompt("other()", call=call), "now(zone='UTC')").reward == 1.0
    with pytest.raises(ValueError, match="'p' has no expected call"):
        ToolCall()(prompt("Paris"), "now()")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 3.0, True),
        ("3", 3, False),
        (True, 1, False),
        (True, True, True),
        (None, None, True),
        (None, False, False),
        ([1, 2], (1, 2.0), True),
        ([1, 2], [2, 1], False),
        ({"a": {"b": [" x "]}}, {"a": {"b": ["x"]}}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ("Paris", "paris", False),
    ],
)
def test_values_compare_as_in_json(one: object, other: object, same: bool) -> None:
    assert same_value(one, other) == same
    assert same_value(other, one) == same


@given(st.text(st.sampled_from("f()[]{}'\",:=1a \\n<>/"), max_size=40))
@settings(deadline=None)
def test_any_text_is_scored(text: str) -> None:
    assert reward_of(text) in (0.0, 0.5, 1.0)
    assert reward_of(f"<tool_call>{text}</tool_call>") in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 90_000,
        "<tool_call>f()</tool_call>" * 40_000,
        "f(" * 500_000,
        "<" * 1_000_000,
    ],
)
def test_hostile_text_takes_no_time(text: str) -> None:
    start = time.thread_time()
    assert reward_of(text) == 0.0
    assert time.thread_time() - start < 0.3


def test_the_weight_of_the_name_must_be_a_share() -> None:
    assert reward_of("get_weather()", tool=0.25) == 0.25
    with pytest.raises(ConfigError, match=r"tool = 1.5 must be between 0 and 1"):
        ToolCall(tool=1.5)


def test_every_option_can_be_set() -> None:
    section = Named.model_validate(
        {"name": "tool_call", "tool": 0.25, "partial": True, "without_target": 0.5}
    )
    made = make_reward("tool_call", reward_options(section))
    assert made == ToolCall(tool=0.25, partial=True, without_target=0.5)
    assert set(section.options) == {field.name for field in fields(ToolCall)}


@pytest.mark.parametrize(
    ("text", "reward", "partial"),
    [
        ('get_weather(city="Paris", days=3)', 1.0, 1.0),
        ('get_weather(city="Paris", days=5)', 0.5, 0.75),
        ('get_forecast(city="Paris", days=3)', 0.0, 0.0),  # the wrong tool, the right arguments
        ("<tool_call>get_weather(city='Paris', days=3)</tool_call>" * 2, 0.0, 0.0),
        ("It will rain.", 0.0, 0.0),
    ],
)
def test_the_table_of_the_docs(text: str, reward: float, partial: float) -> None:
    assert reward_of(text) == reward
    assert reward_of(text, partial=True) == partial
