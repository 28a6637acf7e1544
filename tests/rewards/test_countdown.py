from __future__ import annotations

import time
from typing import Any

import pytest

from covey.rewards.countdown import Countdown
from covey.rewards.score import Score
from covey.tasks.countdown import Countdown as CountdownTask
from covey.types import Prompt


def prompt(answer: str = "27", **info: Any) -> Prompt:
    return Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target=answer, info=info
    )


ASKED = prompt(numbers=[3, 5, 12], target=27)

RIGHT = [
    "12 + 5 * 3",
    "3*5+12",
    "(3*5)+12",
    "12+5*3 = 27",
    "12+5*3=27.0",
    "12 + 5 \u00d7 3",
    "12--5*3",
    "\n12 + 5 * 3\n",
]
USES_BUT_WRONG = [
    "12 + 5 + 3",
    "12 + 5 * 3 = 28",
    "12 + 5 * 3 = 27 = 27",
    "12 - 5 * 3",
    "12 5 3",
    "12 + 5 ** 3",
    "12*5/3",
]
WRONG = [
    "", "27", "27 = 27", "12 + 15", "12 + 5 * 3 + 0", "12 + 5 * 3 * 1", "12 + 5 * 3 + 3 - 3", "5 * 3",
    "12 + 5 * 3.0", "1 2 + 5 * 3", "12 + 5 * 3!", "12 + 5 * 3 # yes", "27 = 12 + 5 * 3", "x", "__import__('os')",
    "\ud800", "\x00", "(" * 10_000, "9" * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("expression", RIGHT)
def test_an_expression_of_all_numbers_that_equals_the_target_is_correct(expression: str) -> None:
    score = Countdown()(ASKED, f"<think>hm</think><answer>{expression}</answer>")
    assert score == Score(reward=1.0, success=True, parts={"accuracy": 1.0, "uses_numbers": 1.0})


@pytest.mark.parametrize("expression", USES_BUT_WRONG)
def test_the_numbers_alone_score_zero(expression: str) -> None:
    score = Countdown()(ASKED, f"<answer>{expression}</answer>")
    assert score == Score(reward=0.0, success=False, parts={"accuracy": 0.0, "uses_numbers": 1.0})


@pytest.mark.parametrize("expression", WRONG, ids=[ascii(w[:20]) for w in WRONG])
def test_other_numbers_and_other_signs_are_wrong(expression: str) -> None:
    score = Countdown()(ASKED, f"<answer>{expression}</answer>")
    parts = {"accuracy": 0.0, "uses_numbers": 0.0}
    assert score == Score(reward=0.0, success=False, parts=parts, attempted=bool(expression))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>12+5*3</answer><answer>12+5*3</answer>", 1.0),
        ("<answer>1</answer><answer>12+5*3</answer>", 0.0),
        ("<answer>12+5*3</answer><answer>1</answer>", 0.0),
        ("<think><answer>12+5*3</answer></think>", 0.0),
        ("<think><answer>12+5*3</answer>", 0.0),
        ("12+5*3", 0.0),
        ("\\boxed{12+5*3}", 0.0),
        ("<answer>\\boxed{12+5*3}</answer>", 1.0),
    ],
)
def test_only_one_answer_after_the_thinking_counts(text: str, reward: float) -> None:
    assert Countdown()(ASKED, text).reward == reward


def test_division_is_exact_and_equal_numbers_count_each() -> None:
    asked = prompt(numbers=[1, 3, 3], target=1)
    assert Countdown()(asked, "<answer>1/3*3</answer>").reward == 1.0
    assert Countdown()(prompt(numbers=[1, 3], target=1), "<answer>1/3*3</answer>").reward == 0.0
    third = prompt(numbers=[1, 3], target=0)
    assert Countdown()(third, "<answer>1/3</answer>").reward == 0.0


def test_the_prompt_target_is_used_without_a_target_in_the_info() -> None:
    assert Countdown()(prompt("15", numbers=[3, 5]), "<answer>3*5</answer>").reward == 1.0


@pytest.mark.parametrize("asked", [prompt(), prompt(numbers=[]), prompt("", numbers=[1])])
def test_a_prompt_without_numbers_or_target_is_an_error(asked: Prompt) -> None:
    with pytest.raises(ValueError, match=r"lacks info\['numbers'\] or info\['target'\]"):
        Countdown()(asked, "<answer>1</answer>")


def test_the_solutions_of_the_task_are_correct() -> None:
    for problem in CountdownTask(train_size=200).train():
        text = f"<think>?</think><answer>{problem.info['solution']}</answer>"
        assert Countdown()(problem, text).success


def test_hostile_text_takes_no_time() -> None:
    for text in ("<answer>" * 125_000, "<answer>" + "1+" * 499_000 + "</answer>", "<" * 1_000_000):
        start = time.thread_time()
        assert Countdown()(ASKED, text).reward == 0.0
        assert time.thread_time() - start < 0.3
