"""Verifiable instructions: one text that follows and one that does not, for all 25."""

# ruff: noqa: RUF001 - the words of other scripts look like ours
from __future__ import annotations

import json
from typing import Any

import pytest

from covey.errors import DataError
from covey.rewards.instructions import CHECKS, OPEN_INSTRUCT, follows, language_of, sentences
from covey.rewards.registry import make_reward
from covey.tasks.instructions import APART, MAKERS, TOPICS
from covey.tasks.registry import make_task
from covey.types import Prompt

# Name, arguments, a text that follows the instruction, and one that does not.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["river", "sun"]}, "The River and the sun.", "The river."),
    ("keywords:frequency", {"keyword": "sun", "relation": "at least", "frequency": 2}, "Sun, sun!", "Sun and sunny."),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "A party.", "The art of it."),
    ("keywords:letter_frequency", {"letter": "Q", "let_relation": "less than", "let_frequency": 2}, "A queen", "Queen, quiz"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Weg, und es ist gut.", "This is not the way."),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3}, "One. Two.", "One. Two. Three."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n***\n"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two three", "one two"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "One.\n\nThen two.", "Then.\n\nOne."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text.\nP.S. More.", "Text.\nP.S."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n**bold**"),
    ("detectable_format:constrained_response", {}, "Well: My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "PART 1 a PART 2 b", "PART 1 a PART b"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<Joy>>\nText", "<< >> Text"),
    ("combination:two_responses", {}, "One\n******\nTwo", "One\n******\nOne"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes.", "Yes. Say it."),
    ("startend:end_checker", {"end_phrase": "Bye now."}, "Hello. bye now.", "Bye now. Hello."),
    ("startend:quotation", {}, '"Text"', '"Text'),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, "GO and RUN", "GO and Run"),
    ("change_case:english_capital", {}, "THE SUN IS UP", "THE sun IS UP"),
    ("change_case:english_lowercase", {}, "the sun is up", "The sun is up"),
    ("punctuation:no_comma", {}, "no comma here", "one, two"),
]  # fmt: skip


def test_the_cases_are_the_published_25() -> None:
    assert [name for name, *_ in CASES] == list(CHECKS)
    assert len(CHECKS) == 25
    assert {name for name, _ in OPEN_INSTRUCT.values()} == set(CHECKS)


@pytest.mark.parametrize(("name", "given", "right", "wrong"), CASES, ids=lambda v: str(v)[:30])
def test_an_instruction(name: str, given: dict[str, Any], right: str, wrong: str) -> None:
    assert follows(right, name, given)
    assert not follows(wrong, name, given)
    assert not follows(" \n", name, given)


@pytest.mark.parametrize(
    ("target", "right", "wrong"),
    [
        ({"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
        ({"func_name": "verify_keyword_frequency", "word": "sun", "N": 2}, "sun sun", "sun sun sun"),
        ({"func_name": "validate_choice", "options": ["A", "B"]}, "It is B", "Apple"),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "So", "i": 2, "keyword_list": None}, "a\n\nSo b", "So\n\nb"),
    ],
)  # fmt: skip
def test_targets_of_open_instruct_mean_the_same(
    target: dict[str, Any], right: str, wrong: str
) -> None:
    reward = make_reward("instructions", {"all_or_nothing": False})
    prompt = Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target=json.dumps(target)
    )
    assert reward(prompt, right).success
    assert not reward(prompt, wrong).success


def test_the_reward_is_the_share_after_the_thinking() -> None:
    info = {
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
        "kwargs": [{"num_words": None}, {}],
    }
    prompt = Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target="", info=info
    )
    share = make_reward("instructions", {"all_or_nothing": False})
    score = share(prompt, "<think>a, b</think> plain text")
    assert (score.reward, score.success, score.parts) == (0.5, False, {"followed": 0.5})
    assert share(prompt, "<think>x</think> <<T>> text").success
    assert share(prompt, "<think>never closed").reward == 0
    strict = make_reward("instructions", {"all_or_nothing": True})
    assert strict(prompt, "plain text").reward == 0


def test_bad_data_is_named() -> None:
    with pytest.raises(DataError, match="needs the argument 'num_words'"):
        follows("x", "length_constraints:number_words", {"relation": "at least"})
    with pytest.raises(DataError, match="'new:thing' is not one of the 25 known"):
        follows("x", "new:thing", {})


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "It was the best of times, and it was not for you."),
        ("fr", "Le chat est dans la maison et il ne veut pas sortir."),
        ("es", "El perro está en la casa y no quiere salir por las noches."),
        ("pt", "O cão está em uma casa e não quer sair com os outros."),
        ("uk", "Це не те, що він знав, але він є тут."), ("bg", "Това не е човек, който се казва така."),
        ("fa", "این کتاب را برای آن مرد که در خانه است خریدم"), ("ur", "یہ کتاب اس آدمی کے لیے ہے جو گھر میں ہے"),
        ("ja", "これは私の本です"), ("ko", "이것은 책입니다"), ("hi", "यह किताब उस आदमी की है"), ("ne", "यो किताब मेरो हो र राम्रो छ"),
        (None, "12 + 3 = 15"),
    ],
)  # fmt: skip
def test_languages(language: str | None, text: str) -> None:
    assert language_of(text) == language


def test_sentences_end_where_they_end() -> None:
    assert sentences("He paid $3.50 to Mr. Smith. Then he left") == 2


def test_the_task_asks_for_what_can_be_followed_together() -> None:
    task = make_task("instructions", {"most": 4})
    prompts = task.train()[:300]
    names = [set(p.info["instruction_id_list"]) for p in prompts]
    assert set().union(*names) == set(MAKERS)
    assert all(len(apart & some) <= 1 for apart in APART for some in names)
    assert prompts[7] == task.train()[7]
    asked = {topic for p in task.held_out() for topic in TOPICS["train"] if topic in p.text}
    assert asked == set()
    reward = make_reward("instructions", {"all_or_nothing": False})
    assert all(0 <= reward(p, "A plain text. It says little.").reward <= 1 for p in prompts)


def test_a_column_of_the_data_chooses_the_reward() -> None:
    tables = {"gsm8k": {"name": "exact_text"}, "ifeval": {"name": "instructions"}}
    reward = make_reward("by_task", {"tasks": tables, "column": "dataset", "default": "gsm8k"})
    ask = ({"role": "user", "content": "?"},)
    target = json.dumps({"func_name": "validate_no_commas"})
    told = Prompt(id="a", task="hub", messages=ask, target=target, info={"dataset": "ifeval"})
    assert reward(told, "no comma").success
    assert reward(Prompt(id="b", task="hub", messages=ask, target="7"), "7").success
    with pytest.raises(ValueError, match="no reward for dataset 'code'"):
        reward(Prompt(id="c", task="hub", messages=ask, target="", info={"dataset": "code"}), "x")
