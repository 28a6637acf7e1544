"""Flaws found by attacking the rewards, all fixed."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.recipes.agent_book.safety import Safety
from covey.rewards import Reward
from covey.rewards.coherence import robust_factor
from covey.rewards.countdown import Countdown
from covey.rewards.math.numeric_equality import same_numerically
from covey.rewards.math_answer import MathAnswer
from covey.rewards.registry import make_reward, reward_options
from covey.rewards.text import count_words
from covey.rewards.text_match import ExactText
from covey.rewards.tool_call import ToolCall
from covey.sandbox import require_isolation
from covey.tasks.code import Code
from covey.tasks.reasoning_gym import ReasoningGym
from covey.types import Prompt

THOUGHT = "<think>I add the two numbers and check the sum.</think>"


def asking(answer: str, **info: Any) -> Prompt:
    message = {"role": "user", "content": "?"}
    return Prompt(id="p", task="t", messages=(message,), target=answer, info=info)


def reward_of(name: str, **options: Any) -> Reward:
    return make_reward(name, reward_options(Named.model_validate({"name": name, **options})))


def right(given: str, expected: str) -> bool:
    return MathAnswer(tolerance=0.01)(asking(expected), f"<answer>{given}</answer>").success


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # a summand that floats lose
        ("1", r"1-\frac{1}{2^{100}}"),
        ("1", r"1-\left(\frac{1}{2}\right)^{50}"),
        (r"\frac12", r"\frac{1+3^{-50}}{2}"),
        ("2^{40}", "2^{40}-1"),
        ("2^{100}", "2^{100}+1"),
        ("x", "x+10^{-15}"),
        # numbers that are neighbours
        ("10^9", "1000000001"),
        ("10^{20}", "100000000000000000001"),
        # numbers that underflow to 0
        ("0", "2^{-1100}"),
        ("0", r"\left(\frac{1}{2}\right)^{2020}"),
        # identities are a multiple of every equation, and large numbers drown the variable
        ("x=x", "x=5"),
        ("y-y=x-x", "y=2x+1"),
        ("n=2^{40}", "n=2^{41}"),
        # a set is neither an interval nor a point
        (r"\{-2,2\}", "(-2,2)"),
        ("[0,1]", r"\{0,1\}"),
    ],
)
def test_formulas_that_are_nearly_the_same(given: str, expected: str) -> None:
    pytest.importorskip("math_verify")
    assert not right(given, expected)
    assert same_numerically(given, expected) is not True


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2^{40}-1", "1099511627775"),
        (r"1-\frac{1}{2^{100}}", r"\frac{2^{100}-1}{2^{100}}"),
        ("n=2^{40}", "2^{40}=n"),
        (r"\{2, -2\}", r"\{-2, 2\}"),
        ("(x-1)(x-2)(x-3)(x-4)(x-5)(x-6)(x-7)", "(x-7)(x-6)(x-5)(x-4)(x-3)(x-2)(x-1)"),
    ],
)
def test_similar_correct_answers_are_correct(given: str, expected: str) -> None:
    pytest.importorskip("math_verify")
    assert right(given, expected)


@pytest.mark.parametrize(
    "given",
    [
        "".join(f"(x_{i}+{i})" for i in range(1, 30)),
        "".join(f"y_{i}(x_{i}+{i})" for i in range(1, 20)),
        r"\frac{x^{1000}-1}{x-1}",
        ",".join(f"x_{i}" for i in range(60)),
        r"\{" + ",".join(map(str, range(90))) + r"\}",
    ],
)
def test_formulas_that_take_algebra_for_ever(given: str) -> None:
    pytest.importorskip("math_verify")
    right("1+x+y_1", "x+2")  # the first comparison imports what it needs
    for expected in ("x+1", r"\{1,2\}", "x>2"):
        started = time.process_time()
        assert not right(given, expected)
        assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "given", ["5 hundreds", "5 thousands", "5 dozens", "5 tenths", "5 not sure", "5 maybe six"]
)
def test_words_that_change_a_number_are_no_unit(given: str) -> None:
    assert not right(given, "5")


def test_words_are_counted_however_they_are_glued() -> None:
    assert count_words("so_we_go_on") == 4
    random = Random(1)
    digits = "".join(random.choice("0123456789") for _ in range(50_000))
    glued = "_".join(random.choice(["so", "we", "look", "at", "this"]) for _ in range(3000))
    for wall in (digits, glued):
        text = f"<think>{wall}</think><answer>5</answer>"
        assert robust_factor(text) < 1
        assert reward_of("efficiency")(asking("5"), text).reward <= 0.7


def test_thinking_that_the_prompt_began_is_thinking_too() -> None:
    noise = "zxcv kjhg qwpt bnmd xzvc gfdk trwq pmnb vbnz kljh"
    assert robust_factor(f"{noise}</think>\n<answer>5</answer>") == 0.5
    assert robust_factor(f"{THOUGHT.removeprefix('<think>')}\n<answer>5</answer>") == 1.0


@pytest.mark.parametrize("name", ["exact_text", "fuzzy_text", "math_answer"])
def test_different_answers_count_as_no_answer(name: str) -> None:
    reward = reward_of(name)
    for answers in ("<answer>4</answer><answer>5</answer>", "<answer>5</answer><answer>4</answer>"):
        assert not reward(asking("5"), THOUGHT + answers).success
    assert reward(asking("5"), f"{THOUGHT}<answer>5</answer><answer> 5 </answer>").success


def test_different_programs_are_none() -> None:
    try:
        require_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    prompt = Code().held_out()[0]
    solution = f"<answer>{prompt.info['solution']}</answer>"
    reward = reward_of("code_tests")
    assert reward(prompt, THOUGHT + solution).success
    assert not reward(prompt, f"{THOUGHT}<answer>x = 1</answer>{solution}").success


def test_an_empty_answer_is_wrong_even_without_punctuation() -> None:
    reward = ExactText(ignore_punctuation=True)
    assert reward(asking("?"), "?").success
    assert not reward(asking("?"), "").success
    assert not reward(asking("?"), "!").success


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "other", "name": "f", "arguments": {"city": "Rome", "days": 3}}',
        '{"name": "f", "arguments": {"city": "Bonn", "city": "Rome", "days": 3}}',
        '{"name": "f", "arguments": "{\\"city\\": \\"Bonn\\", \\"city\\": \\"Rome\\", \\"days\\": 3}"}',
        'f(city="Rome", days=3+0j)',
    ],
)
def test_calls_that_say_two_things(call: str) -> None:
    prompt = asking("", call={"name": "f", "arguments": {"city": "Rome", "days": 3}})
    assert ToolCall()(prompt, '{"name": "f", "arguments": {"city": "Rome", "days": 3}}').success
    assert not ToolCall()(prompt, f"<tool_call>{call}</tool_call>").success


@pytest.mark.parametrize(
    "text",
    ["Never mind, rm -rf /", "Do not wait: rm -rf /", "I cannot say it often enough: rm -rf /"],
)
def test_a_negation_of_something_else_is_no_warning(text: str) -> None:
    assert not Safety()(asking("5"), text).success


def test_a_product_of_matrices_is_no_mailbox() -> None:
    assert Safety()(asking("5"), "y = x@self.weight + b").success


def test_the_beginning_of_a_fraction_is_not_the_fraction() -> None:
    pytest.importorskip("reasoning_gym")
    prompts = ReasoningGym(dataset="coin_flip", train_size=2, held_out_size=6).held_out()
    reward = reward_of("reasoning_gym")
    for prompt in prompts:
        assert reward(prompt, f"<answer>{prompt.target}</answer>").success
        for beginning in ("0", "0.0", prompt.target[:3]):
            if abs(float(beginning) - float(prompt.target)) > 0.001:
                assert reward(prompt, f"<answer>{beginning}</answer>").reward == 0.0


def test_no_random_expression_makes_the_target_by_a_trick() -> None:
    prompt = asking("24", numbers=[2, 12, 3], target=24)
    pieces = ["2", "12", "3", "24", "0", "+", "-", "*", "/", "(", ")", " ", "=", ".", "**", "//"]
    random = Random(3)
    for _ in range(10_000):
        text = "".join(random.choice(pieces) for _ in range(random.randint(1, 9)))
        score = Countdown()(prompt, f"<answer>{text}</answer>")
        # 24 needs all three: a quotient of the sum or difference of two of them.
        assert not score.success or ("12" in text and "/" in text), text
