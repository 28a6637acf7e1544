from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards.format import AgentExampleForm, ThinkAnswerForm, ThinkToolForm, is_call
from covey.rewards.score import Reward, Score
from covey.rewards.think_answer import parse_think_answer
from covey.types import Prompt

PROMPT = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="49")
THOUGHT = "<think>twenty characters of thought</think>"
SHORT = "<think>short</think>"
CALL = "<tool_call>search('tea')</tool_call>"


def judge(reward: Reward, text: str) -> Score:
    return reward(PROMPT, text)


STRICT = [
    ("<think>a</think><answer>b</answer>", 1.0, 1.0),
    (" \n<think>a</think>\n\n<answer> b </answer>\n", 1.0, 1.0),
    ("", 0.0, 0.0),
    ("a b", 0.0, 0.0),
    ("<think>a</think>", 0.0, 0.25),
    ("<answer>b</answer>", 0.0, 0.25),
    ("<think></think><answer>b</answer>", 0.0, 0.25),
    ("<think>a</think><answer> \n</answer>", 0.0, 0.25),
    ("<think> </think><answer></answer>", 0.0, 0.0),
    ("so <think>a</think><answer>b</answer>", 0.0, 0.5),
    ("<think>a</think> so <answer>b</answer>", 0.0, 0.5),
    ("<think>a</think><answer>b</answer>.", 0.0, 0.5),
    ("<answer>b</answer><think>a</think>", 0.0, 0.5),
    ("<think><answer>b</answer></think>", 0.0, 0.5),
    ("<think>a<answer></think>b</answer>", 0.0, 0.5),
    ("<think>a</think><think>a</think><answer>b</answer>", 0.0, 0.25),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.25),
    ("<think>a<answer>b</answer>", 0.0, 0.25),
    ("</think>a<think><answer>b</answer>", 0.0, 0.25),
    ("<THINK>a</THINK><ANSWER>b</ANSWER>", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "strict", "graded"), STRICT)
def test_think_answer_form(text: str, strict: float, graded: float) -> None:
    score = judge(ThinkAnswerForm(), text)
    assert (score.reward, score.success) == (strict, strict == 1.0)
    lenient = judge(ThinkAnswerForm(graded=True), text)
    assert (lenient.reward, lenient.success) == (graded, strict == 1.0)
    assert lenient.parts == score.parts


TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@given(st.lists(st.sampled_from([*TAGS, *TAGS, "a", " ", "<"]), max_size=9).map("".join))
@settings(deadline=None)
def test_the_strict_format_is_that_of_the_think_answer_reward(text: str) -> None:
    assert judge(ThinkAnswerForm(), text).success == (parse_think_answer(text) is not None)


def test_other_tag_names() -> None:
    form = ThinkAnswerForm(think="reasoning", graded=True)
    assert judge(form, "<reasoning>a</reasoning><answer>b</answer>").reward == 1.0
    assert judge(form, "<think>a</think><answer>b</answer>").reward == 0.25


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("a</think><answer>b</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 0.0),
        ("</think><answer>b</answer>", 0.0),
        ("a<answer>b</answer>", 0.0),
    ],
)
def test_a_prefilled_prompt_has_opened_the_thinking(text: str, reward: float) -> None:
    assert judge(ThinkAnswerForm(prefilled=True), text).reward == reward


@pytest.mark.parametrize(
    "names", [("", "answer"), ("a b", "answer"), ("<think>", "answer"), ("x", "x")]
)
def test_tag_names_are_checked(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^reward: "):
        ThinkAnswerForm(think=names[0], answer=names[1])


TOOL = [
    (f"{THOUGHT} {CALL}", 1.0, {"think": 1.0, "tool": 1.0, "tidy": 1.0}),
    (f"{THOUGHT} 42", 1.0, {"think": 1.0, "direct": 1.0, "tidy": 1.0}),
    (f"{THOUGHT}{CALL}{CALL}{CALL}", 1.0, {"think": 1.0, "tool": 1.0, "tidy": 1.0}),
    (f"{THOUGHT}{CALL} so it is tea", 1.0, {"think": 1.0, "tool": 1.0, "tidy": 1.0}),
    (
        f'{THOUGHT}<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>',
        1.0,
        {"think": 1.0, "tool": 1.0, "tidy": 1.0},
    ),
    (f"{SHORT}{CALL}", 0.8, {"think": 0.5, "tool": 1.0, "tidy": 1.0}),
    (f"<think>{'x' * 19}</think>{CALL}", 0.8, {"think": 0.5, "tool": 1.0, "tidy": 1.0}),
    (f"<think>{'x' * 20}</think>{CALL}", 1.0, {"think": 1.0, "tool": 1.0, "tidy": 1.0}),
    (f"<think>{' ' * 30}</think>{CALL}", 0.8, {"think": 0.5, "tool": 1.0, "tidy": 1.0}),
    (f"{THOUGHT}<tool_call>search</tool_call>", 0.8, {"think": 1.0, "tool": 0.5, "tidy": 1.0}),
    (
        f"{THOUGHT}{CALL}<tool_call>search</tool_call>",
        0.8,
        {"think": 1.0, "tool": 0.5, "tidy": 1.0},
    ),
    (THOUGHT, 0.6, {"think": 1.0, "direct": 0.0, "tidy": 1.0}),
    ("42", 0.0, {"think": 0.0, "direct": 0.0, "tidy": 0.0}),
    ("", 0.0, {"think": 0.0, "direct": 0.0, "tidy": 0.0}),
    (CALL, 0.4, {"think": 0.0, "tool": 1.0, "tidy": 0.0}),
    (f"{CALL}{THOUGHT}", 0.8, {"think": 1.0, "tool": 1.0, "tidy": 0.0}),
    (
        f"<think>twenty characters of thought{CALL}</think>",
        0.8,
        {"think": 1.0, "tool": 1.0, "tidy": 0.0},
    ),
    (f"{THOUGHT}{THOUGHT}{CALL}", 0.4, {"think": 0.0, "tool": 1.0, "tidy": 0.0}),
    (f"<think>{THOUGHT}</think>{CALL}", 0.2, {"think": -0.5, "tool": 1.0, "tidy": 0.0}),
    (f"<think>twenty characters of thought {CALL}", 0.2, {"think": -0.5, "tool": 1.0, "tidy": 0.0}),
    (f"</think>x<think>{CALL}", 0.2, {"think": -0.5, "tool": 1.0, "tidy": 0.0}),
    (f"{THOUGHT}<tool_call>search('tea')", 0.2, {"think": 1.0, "tool": -0.5, "tidy": 0.0}),
    (
        f"{THOUGHT}</tool_call>search('tea')<tool_call>",
        0.2,
        {"think": 1.0, "tool": -0.5, "tidy": 0.0},
    ),
    (f"{THOUGHT}<tool_call>{CALL}</tool_call>", 0.2, {"think": 1.0, "tool": -0.5, "tidy": 0.0}),
    ("<think><tool_call>", 0.0, {"think": -0.5, "tool": -0.5, "tidy": 0.0}),
]


@pytest.mark.parametrize(("text", "reward", "parts"), TOOL)
def test_think_tool_form(text: str, reward: float, parts: dict[str, float]) -> None:
    score = judge(ThinkToolForm(), text)
    assert (score.reward, score.success) == (reward, reward == 1.0)
    assert score.parts == parts


def test_the_least_thinking_is_an_option() -> None:
    assert judge(ThinkToolForm(min_thinking=5), f"{SHORT}{CALL}").reward == 1.0
    with pytest.raises(ConfigError, match="min_thinking must be at least 1"):
        ThinkToolForm(min_thinking=0)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("f()", True),
        (" f(x, y=(1, 2))\n", True),
        ("tools.search('a\nb')", True),
        ('{"name": "f"}', True),
        ("f", False),
        ("(x)", False),
        ("1f(x)", False),
        ("f(x", False),
        ("call f(x)", False),
        ("", False),
        ('{"name": ""}', False),
        ('{"name": 3}', False),
        ('{"arguments": {}}', False),
        ('{"name": "f"', False),
        ('{"a": ' * 100_000, False),
        ('{"name": "f", "a": ' + "[" * 100_000, False),
        ("[" * 100_000, False),
    ],
)
def test_what_reads_as_a_call(text: str, holds: bool) -> None:
    assert is_call(text) is holds


AGENT = [
    ("", 0.0),
    ("<think>a</think>", 0.2),
    (f"<think>{'x' * 20}</think>", 0.2),
    (f"<think>{'x' * 21}</think>", 0.3),
    ("</think>a<think>", 0.0),
    ("<tool_call>a</tool_call>", 0.3),
    (CALL, 0.5),
    ("</tool_call>f()<tool_call>", 0.0),
    (THOUGHT + CALL, 0.8),
    (SHORT + CALL, 0.7),
    (THOUGHT + CALL * 5, 0.8),
    (THOUGHT + CALL * 6, 0.7),
    (THOUGHT + CALL * 13, 0.0),
    (THOUGHT + CALL * 30, 0.0),
]


@pytest.mark.parametrize(("text", "reward"), AGENT)
def test_agent_example_form(text: str, reward: float) -> None:
    score = judge(AgentExampleForm(), text)
    assert (score.reward, score.success) == (reward, reward == 0.8)


FORMS = [ThinkAnswerForm(graded=True), ThinkToolForm(), AgentExampleForm()]
HOSTILE = {
    "angles": "<" * 1_000_000,
    "openings": "<think>" * 140_000,
    "pairs": "<think>x</think>" * 60_000,
    "calls": "<think>x</think>" + CALL * 25_000,
    "open calls": "<tool_call>" * 90_000 + "</tool_call>",
    "one call": f"<tool_call>f({'(' * 1_000_000}</tool_call>",
    "blanks": f"<think>{' ' * 1_000_000}x</think>",
    "surrogates": "\ud800" * 1_000_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_a_megabyte_takes_less_than_half_a_second(form: Reward, text: str) -> None:
    begin = time.process_time()
    score = judge(form, text)
    assert time.process_time() - begin < 0.5
    assert form.bounds[0] <= score.reward <= form.bounds[1]


@given(
    st.lists(
        st.sampled_from([*TAGS, "<tool_call>", "</tool_call>", "f(x)", "x" * 21]), max_size=12
    ).map("".join)
)
@settings(deadline=None)
def test_rewards_stay_within_their_bounds_and_success_is_the_most(text: str) -> None:
    for form in FORMS:
        score = judge(form, text)
        assert form.bounds[0] <= score.reward <= form.bounds[1]
        assert score.success == (score.reward == form.bounds[1])
