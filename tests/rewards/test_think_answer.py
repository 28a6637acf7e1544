from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards import Score, ThinkAnswer
from covey.rewards.registry import REWARDS
from covey.rewards.think_answer import parse_think_answer, same_answer
from covey.types import Prompt

STEPS = " ".join(f"Then {n} plus {n * n} is {n + n * n}." for n in range(150))

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def judge(text: str, answer: str = "49", robust: bool = True) -> Score:
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target=answer)
    return ThinkAnswer(robust=robust)(prompt, text)


def well_formed(answer: str) -> str:
    return f"<think>47+8=55;55-6=49</think><answer>{answer}</answer>"


RIGHT = {
    "plain": well_formed("49"),
    "blanks inside": well_formed(" 49\n"),
    "blanks around": f"\n {well_formed('49')} \n",
    "blanks between": "<think>x</think>\n\n<answer>49</answer>",
    "lines in think": "<think>a\nb\n</think><answer>49</answer>",
    "wrong working": "<think>50</think><answer>49</answer>",
    "leading zero": well_formed("049"),
    "decimal": well_formed("49.0"),
    "exponent": well_formed("4.9e1"),
    "plus": well_formed("+49"),
    "other tags in think": "<think><b>1 < 2</b></think><answer>49</answer>",
    "long think": f"<think>{STEPS}</think><answer>49</answer>",
    "long blanks": f"<think>x</think>{' ' * 1_000_000}<answer>49</answer>",
}
WRONG = {
    "other number": well_formed("48"),
    "negative": well_formed("-49"),
    "nan": well_formed("nan"),
    "inf": well_formed("inf"),
    "words": well_formed("forty-nine"),
    "two numbers": well_formed("49 49"),
    "list": well_formed("49, 50"),
    "equation": well_formed("40+9"),
    "hexadecimal": well_formed("0x31"),
    "unit": well_formed("49 apples"),
    "comma": well_formed("49,0"),
    "prefix": well_formed("4"),
    "close": well_formed("49.0000001"),
    "long number": well_formed("4" + "9" * 100_000),
    "huge": well_formed("1e999"),
    "boxed": well_formed("\\boxed{49}"),
}
MALFORMED = {
    "empty": "",
    "bare": "49",
    "no think": "<answer>49</answer>",
    "no answer": "<think>49</think>",
    "bare answer": "<think>x</think>49",
    "empty think": "<think></think><answer>49</answer>",
    "empty answer": "<think>49</think><answer></answer>",
    "text before": "So: " + well_formed("49"),
    "text between": "<think>x</think> so <answer>49</answer>",
    "text after": well_formed("49") + ".",
    "open answer": "<think>x</think><answer>49",
    "open think": "<think>x<answer>49</answer>",
    "unopened think": "x</think><answer>49</answer>",
    "unopened answer": "<think>x</think>49</answer>",
    "reversed order": "<answer>49</answer><think>x</think>",
    "answer in think": "<think>x<answer>49</answer></think>",
    "think in answer": "<think>x</think><answer><think>49</think></answer>",
    "crossed": "<think>x<answer></think>49</answer>",
    "answer twice": well_formed("48") + "<answer>49</answer>",
    "all twice": well_formed("49") * 2,
    "think twice": "<think>a</think><think>b</think><answer>49</answer>",
    "doubled tag": "<think><think>x</think><answer>49</answer>",
    "tag in answer": "<think>x</think><answer>49<answer></answer>",
    "upper case": "<THINK>x</THINK><ANSWER>49</ANSWER>",
    "blank in tag": "<think >x</think><answer>49</answer>",
    "many tags": "<think>" * 100_000 + "</answer>" * 100_000,
    "many answers": "<think>x</think>" + "<answer>49</answer>" * 50_000,
    "closing only": "</think>x</think></answer>49</answer>",
    "nul after": well_formed("49") + "\x00",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_correct_number_in_the_format_scores_1(text: str) -> None:
    assert judge(text) == Score(
        reward=1.0, success=True, parts={"correct": 1.0, "format": 1.0, "robust": 1.0}
    )


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_in_the_format_scores_a_tenth(text: str) -> None:
    assert judge(text) == Score(
        reward=0.1, success=False, parts={"correct": 0.0, "format": 1.0, "robust": 1.0}
    )


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_broken_format_scores_zero_even_with_the_correct_number(text: str) -> None:
    assert judge(text) == Score(
        reward=0.0, success=False, parts={"correct": 0.0, "format": 0.0, "robust": 1.0}
    )


def text_of_fragments() -> st.SearchStrategy[str]:
    fragments = st.sampled_from([*TAGS, *TAGS, "49", "x", " y ", "<", "think>", "/"])
    return st.lists(fragments, max_size=9).map("".join)


@given(st.one_of(st.text(), text_of_fragments(), st.text().map(well_formed)))
@settings(deadline=None)
def test_any_text_is_worth_0_or_a_tenth_or_1_and_parts_say_why(text: str) -> None:
    score = judge(text)
    assert score.reward in (0.0, 0.1, 1.0)
    assert score.success == (score.reward == 1.0)
    assert score.parts["format"] == float(score.reward > 0)
    assert score.parts["correct"] == float(score.success)


@given(text_of_fragments())
@example(well_formed("49"))
@example("<think>a</think><answer>b</answer>c")
@settings(deadline=None)
def test_the_format_holds_exactly_if_the_four_tags_are_in_order_and_not_empty(
    text: str,
) -> None:
    pieces = re.split(r"(</?think>|</?answer>)", text)
    outside, inside = pieces[0:9:4], pieces[2:9:4]
    holds = pieces[1::2] == TAGS and all(inside) and not "".join(outside).strip()
    assert (parse_think_answer(text) is not None) == holds


@given(st.text(st.characters(exclude_characters="<>"), min_size=1).filter(str.strip))
@settings(deadline=None)
def test_whitespace_around_the_answer_is_ignored(answer: str) -> None:
    assert parse_think_answer(well_formed(f" {answer}\n")) == answer.strip()


@given(st.text())
@example("nan")
@example("inf")
@example("Paris")
@settings(deadline=None)
def test_the_target_itself_is_always_correct(answer: str) -> None:
    assert same_answer(answer, answer)


@given(st.integers(-(10**6), 10**6))
@settings(deadline=None)
def test_forms_of_the_same_number_are_equal_and_other_numbers_are_not(number: int) -> None:
    forms = [f"{number}", f"{number}.0", f"{number:07d}", f"{number}e0"]
    assert all(same_answer(form, str(number)) for form in forms)
    assert not any(same_answer(form, str(number + 1)) for form in forms)


@pytest.mark.parametrize(
    ("given_answer", "expected", "equal"),
    [
        ("7", "07", True),
        ("7.0", "07", True),
        ("7.50", "7.5", True),
        ("-0", "0", True),
        ("7", "70", False),
        ("7", "-7", False),
        ("Paris", "Paris", True),
        ("paris", "Paris", False),
        ("7", "seven", False),
        ("", "0", False),
        ("nan", "49", False),
        ("inf", "49", False),
    ],
)
def test_answers_compare_as_numbers_if_both_are_numbers(
    given_answer: str, expected: str, equal: bool
) -> None:
    assert same_answer(given_answer, expected) == equal


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [("9007199254740992", "9007199254740993"), ("1" * 400, "2" * 400), ("1e999", "inf")],
    ids=["beyond 2**53", "beyond the largest float", "overflow is not infinity"],
)
def test_different_numbers_are_different_however_large(given_answer: str, expected: str) -> None:
    assert not same_answer(given_answer, expected)


def test_an_underscore_is_no_part_of_a_number() -> None:
    assert not same_answer("4_9", "49")


@given(
    correct=st.floats(0, 10, allow_subnormal=False),
    form=st.floats(0.01, 10, allow_subnormal=False),
)
@settings(deadline=None)
def test_weights_scale_the_reward_but_not_the_parts(correct: float, form: float) -> None:
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="49")
    reward = REWARDS["think_answer"](correct=correct, format=form)
    right, wrong = reward(prompt, well_formed("49")), reward(prompt, well_formed("48"))
    assert (right.reward, wrong.reward) == (correct + form, form)
    assert right.parts == {"correct": 1.0, "format": 1.0, "robust": 1.0}
    assert wrong.parts == {"correct": 0.0, "format": 1.0, "robust": 1.0}


@pytest.mark.parametrize("weights", [(-0.1, 0.1), (0.9, -0.1), (0.0, 0.0)])
def test_negative_weights_and_no_weights_at_all_are_config_errors(
    weights: tuple[float, float],
) -> None:
    with pytest.raises(ConfigError, match=r"^reward: weights .*") as raised:
        ThinkAnswer(correct=weights[0], format=weights[1])
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("thinking", "reward"),
    [("x" * 1_000_000, 0.325), ("sdkfj wqeoiruz qpwoei zmxncbv " * 2, 0.55), (STEPS * 3, 0.415)],
    ids=["one letter", "mash", "everything three times"],
)
def test_a_correct_answer_after_incoherent_thinking_scores_less(
    thinking: str, reward: float
) -> None:
    text = f"<think>{thinking}</think><answer>49</answer>"
    score = judge(text)
    assert score.success
    assert score.reward == pytest.approx(reward)
    assert judge(text, robust=False).reward == 1.0
