from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.recipes.grpo_zero.rewards import GrpoZero
from covey.recipes.lm_book.rewards import LmBook
from covey.recipes.nano_aha.rewards import NanoAha
from covey.recipes.open_instruct.rewards import OpenInstruct
from covey.recipes.simple_grpo.rewards import SimpleGrpo
from covey.rewards.score import Reward, Score
from covey.types import Prompt

FOUR = {"nums": [6, 3, 4, 2], "target": 24}


def judge(
    reward: Reward, text: str, answer: str = "18", info: dict[str, Any] | None = None
) -> Score:
    messages = ({"role": "user", "content": "?"},)
    prompt = Prompt(id="p", task="t", messages=messages, target=answer, info=info or FOUR)
    return reward(prompt, text)


def book(answer: str) -> str:
    return f"<reasoning>\nso\n</reasoning>\n<answer>\n{answer}\n</answer>"


LM_BOOK = [
    (book("18"), "18", 2.8),
    (book("Paris"), "Paris", 2.8),
    (book("-5"), "-5", 2.8),
    (book("18.0"), "18", 2.3),
    (book("$18"), "18", 2.3),
    (book("18 dollars"), "18", 2.3),
    (book("x = -5"), "-5", 2.3),
    (book("\u22125"), "-5", 2.3),
    (book("1,000 eggs"), "1000", 2.3),
    (book("18."), "18", 2.3),
    (book("19"), "18", 0.8),
    (book("5"), "-5", 0.8),
    (book("-5"), "5", 0.8),
    (book("18 or 19"), "18", 0.8),
    (book("9+9"), "18", 0.8),
    (book("3,4"), "34", 0.8),
    (book("9007199254740992 eggs"), "9007199254740993", 0.8),
    (book("..."), "...", 0.8),
    (book(""), "18", 0.8),
    (book(""), "", 0.8),
    (book("eighteen"), "18", 0.8),
    (book("17") + "<answer>18</answer>", "18", 2.8),
    (book("18") + "<answer>17</answer>", "18", 0.8),
    (book("18") + "<answer>", "18", 0.8),
    ("<answer>18</answer>", "18", 2.4),
    ("<answer>18", "18", 0.2),
    ("</answer>18<answer>", "18", 0.4),
    ("18", "18", 0.0),
    ("", "18", 0.0),
    ("<reasoning></reasoning>", "18", 0.4),
    (book("9" * 5000), "18", 0.8),
]


@pytest.mark.parametrize(("text", "answer", "value"), LM_BOOK)
def test_lm_book(text: str, answer: str, value: float) -> None:
    score = judge(LmBook(), text, answer)
    assert score.reward == value
    assert score.success == (value >= 1.5)
    assert sum(score.parts.values()) == pytest.approx(value)


COUNTDOWN = [
    # 6, 3, 4, 2 make 24: text after `<think>`, nano's format, GRPO-Zero's format, solved.
    ("x</think>\n<answer>6 * 4 * (3 - 2)</answer>", 1.0, 1.0, 1),
    ("x</think>\n<answer> 6*4/(3-2) </answer>", 1.0, 1.0, 1),
    ("x</think>\n<answer>6*4*(3-2)</answer>\n", 1.0, 1.0, 1),
    ("x</think>\n<answer>(6 + 3 * 2) / 2 * 4</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 * 4</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 * 4 * 3 / 3</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 * 4 * (3 - 2) + 2 - 2</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 + 3 + 4 + 2</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>24</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>63 - 42</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 / (3 - 3) * 4 * 2</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6**4**3**2</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>((6 * 4</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 4 3 2</answer>", 1.0, 1.0, 0),
    ("x</think>\n<answer>6 * 4 * (3 - 2) = 24</answer>", 0.5, 1.0, 0),
    ("x</think>\n<answer>__import__('os')</answer>", 0.5, 1.0, 0),
    ("x</think>\n<answer>six times four</answer>", 0.5, 1.0, 0),
    ("x</think>\n<answer></answer>", 0.5, 1.0, 0),
    ("x</think><answer>6*4*(3-2)</answer>", 0.0, 0.6, 1),
    ("x</think>\n\n<answer>6*4*(3-2)</answer>", 0.0, 0.6, 1),
    ("x</think>\n<answer>6*4*(3-2)</answer> done", 0.0, 0.6, 1),
    ("<think>x</think>\n<answer>6*4*(3-2)</answer>", 0.0, 0.6, 1),
    ("x</think>\n<answer>1</answer><answer>6*4*(3-2)</answer>", 0.0, 0.6, 0),
    ("x\n<answer>6*4*(3-2)</answer>", 0.0, 0.5, 1),
    ("x</think>\n<answer>6*4*(3-2)", 0.0, 0.1, 0),
    ("x</think>", 0.0, 0.1, 0),
    ("6*4*(3-2)", 0.0, 0.0, 0),
    ("", 0.0, 0.0, 0),
]


@pytest.mark.parametrize(("text", "nano", "zero", "solved"), COUNTDOWN)
def test_countdown(text: str, nano: float, zero: float, solved: int) -> None:
    assert judge(NanoAha(), text) == Score(
        reward=nano + solved, success=bool(solved), parts={"format": nano, "equation": solved}
    )
    score = judge(GrpoZero(), text)
    assert score.reward == pytest.approx(0.1 * zero + solved)
    assert (score.success, score.parts) == (bool(solved), {"format": zero, "answer": solved})


@pytest.mark.parametrize("reward", [NanoAha(prefilled=False), GrpoZero(prefilled=False)])
@pytest.mark.parametrize(("text", "nano", "zero", "solved"), COUNTDOWN[:3])
def test_countdown_where_the_text_opens_the_thinking(
    reward: Reward, text: str, nano: float, zero: float, solved: int
) -> None:
    assert judge(reward, f"<think>{text}").reward == reward.bounds[1]
    assert judge(reward, text).parts["format"] < 1.0


@pytest.mark.parametrize(
    ("target", "solved"), [(24, 1), (24.000009, 1), (24.00001, 0), ("24", 1), (-24, 0)]
)
def test_the_target_is_met_within_a_hundred_thousandth(target: object, solved: int) -> None:
    info = {"numbers": [6, 3, 4, 2], "target": target}
    assert judge(NanoAha(), COUNTDOWN[0][0], info=info).parts["equation"] == solved


def test_a_negative_target_can_be_met() -> None:
    info = {"numbers": [3, 5], "target": -2}
    assert judge(GrpoZero(), "x</think>\n<answer>3 - 5</answer>", info=info).reward == 1.1


@pytest.mark.parametrize("reward", [NanoAha(), GrpoZero()])
@pytest.mark.parametrize(
    ("info", "missing"),
    [({"target": 24}, "numbers"), ({"nums": [1]}, "target"), ({"x": 1}, "numbers")],
)
def test_a_prompt_without_a_problem_is_named(
    reward: Reward, info: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ValueError, match=f"^prompt p: countdown needs '{missing}' in info"):
        judge(reward, "text", info=info)


def form(answer: str) -> str:
    return f"<think>so</think>\n<answer>{answer}</answer>"


SIMPLE = [
    (form("18"), "18", 1, 1.25),
    (form("It is $18."), "18", 1, 1.25),
    (form("18.0"), "18", 1, 1.25),
    (form("-5"), "-5", 1, 1.25),
    (form("3/4"), "3/4", 1, 1.25),
    (form("3/4"), "0.75", 1, 1.25),
    (form("1,000"), "1000", 1, 1.25),
    (form("1000"), "1,000", 1, 1.25),
    (form("17 or 18"), "18", 1, 1.25),
    (form("18") + "\n", "18", 1, 1.25),
    ("<think>so</think><answer>18</answer>", "18", 1, 1.25),
    ("<think>so</think> \n \n<answer>18</answer>", "18", 1, 1.25),
    ("<think></think><answer>18</answer>", "18", 1, 1.25),
    (form("19"), "18", -1, 1.25),
    (form("-5"), "5", -1, 1.25),
    (form("5"), "-5", -1, 1.25),
    (form("18, not 19"), "18", -1, 1.25),
    (form("eighteen"), "18", -1, 1.25),
    (form("18"), "eighteen", -1, 1.25),
    ("<think>18</think><answer>none</answer>", "18", 1, 1.25),
    ("The answer is 18", "18", 1, -1),
    ("so " + form("18"), "18", 1, -1),
    (form("18") + " done", "18", 1, -1),
    ("<think>so</think>\t<answer>18</answer>", "18", 1, -1),
    ("<think>so</think>then<answer>18</answer>", "18", 1, -1),
    (form("18") + form("18"), "18", 1, -1),
    ("<think>a<think>b</think><answer>18</answer>", "18", 1, -1),
    ("<answer>18</answer><think>so</think>", "18", 1, -1),
    ("<think>so</think><answer>18", "18", 1, -1),
    ("nothing", "18", -1, -1),
    ("", "18", -1, -1),
]


@pytest.mark.parametrize(("text", "answer", "correct", "well_formed"), SIMPLE)
def test_simple_grpo(text: str, answer: str, correct: float, well_formed: float) -> None:
    assert judge(SimpleGrpo(), text, answer) == Score(
        reward=correct + well_formed,
        success=correct == 1,
        parts={"correct": correct, "format": well_formed},
    )


OPEN = [
    # text, gated, additive
    ("so</think><answer>18</answer>", 10.0, 11.0),
    ("<think>so</think> \n\t<answer>it is 18.</answer>", 10.0, 11.0),
    ("so</think><answer>18</answer> as I said", 10.0, 11.0),
    ("so</think><answer>17, or rather 18</answer>", 10.0, 11.0),
    ("so</think><answer>17</answer></think><answer>18</answer>", 10.0, 11.0),
    ("so</think><answer>18</answer></think><answer>17</answer>", 0.0, 1.0),
    ("so</think><answer>18</answer></think><answer>none</answer>", 0.0, 1.0),
    ("so</think><answer>-18</answer>", 0.0, 1.0),
    ("so</think><answer>19</answer>", 0.0, 1.0),
    ("18</think><answer>none</answer>", 0.0, 1.0),
    ("so</think><answer></answer>", 0.0, 1.0),
    ("so</think><answer>19</answer> 18", 0.0, 1.0),
    ("<answer>18</answer>", 0.0, 10.0),
    ("so</think>then<answer>18</answer>", 0.0, 10.0),
    ("so</think><answer>18", 0.0, 10.0),
    ("</answer>so</think><answer>18", 0.0, 10.0),
    ("18", 0.0, 10.0),
    ("19", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "gated", "additive"), OPEN)
def test_open_instruct(text: str, gated: float, additive: float) -> None:
    score = judge(OpenInstruct(), text)
    assert (score.reward, score.success) == (gated, gated > 0)
    score = judge(OpenInstruct(additive=True), text)
    assert (score.reward, score.success) == (additive, additive >= 10)
    assert score.reward == 10 * score.parts["verified"] + score.parts["format"]


def test_a_negative_answer_keeps_its_sign() -> None:
    assert judge(OpenInstruct(), "so</think><answer>-5</answer>", "-5").reward == 10.0
    assert judge(OpenInstruct(), "so</think><answer>5</answer>", "-5").reward == 0.0


@pytest.mark.parametrize("format_reward", [0.0, 0.5, 1.0, 2.0])
def test_the_value_of_the_format_does_not_close_the_gate(format_reward: float) -> None:
    gated = OpenInstruct(r1_style_format_reward=format_reward)
    assert judge(gated, OPEN[0][0]).reward == 10.0
    assert gated.bounds == (0.0, 10.0)
    additive = OpenInstruct(r1_style_format_reward=format_reward, additive=True)
    assert judge(additive, OPEN[0][0]).reward == 10.0 + format_reward
    assert additive.bounds == (0.0, 10.0 + format_reward)


@pytest.mark.parametrize(
    "options",
    [
        {"verification_reward": 0},
        {"verification_reward": float("inf")},
        {"r1_style_format_reward": -1},
    ],
)
def test_weights_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^reward: {next(iter(options))} must be "):
        OpenInstruct(**options)


REWARDS = [
    LmBook(),
    NanoAha(),
    GrpoZero(),
    SimpleGrpo(),
    OpenInstruct(),
    OpenInstruct(additive=True),
]
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<reasoning>",
    "</reasoning>",
    "\n",
    "18",
    "-",
    "6*4*(3-2)",
    "...",
]


@given(st.one_of(st.text(st.characters()), st.lists(st.sampled_from(PIECES)).map("".join)))
@settings(deadline=None)
def test_no_text_raises_and_every_reward_lies_within_its_bounds(text: str) -> None:
    for reward in REWARDS:
        low, high = reward.bounds
        assert low <= judge(reward, text).reward <= high


HOSTILE = {
    "angles": "<" * 1_000_000,
    "tower": "x</think>\n<answer>95**87**64</answer>",
    "deep": f"x</think>\n<answer>{'(' * 500_000}1{')' * 500_000}</answer>",
    "signs": f"x</think>\n<answer>{'-' * 1_000_000}1</answer>",
    "digits": f"x</think>\n<answer>{'9' * 1_000_000}</answer>",
    "numbers": f"x</think>\n<answer>{'9 ' * 500_000}</answer>",
    "openings": "</think><answer>" * 60_000 + "</answer>",
    "answers": "</think><answer>1</answer>" * 40_000,
    "blanks": f"</think>{' ' * 1_000_000}<answer>",
    "commas": f"<answer>{'1,' * 500_000}</answer>",
    "surrogates": f"x</think>\n<answer>{chr(0xD800) * 500_000}</answer>",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_takes_less_than_half_a_second_each(text: str) -> None:
    for reward in REWARDS:
        begin = time.process_time()
        assert not judge(reward, text).success
        assert time.process_time() - begin < 0.5
