from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards.extract import STYLES, check_styles, extract_answer, extract_text, last_number
from covey.rewards.math import number
from covey.rewards.math.number import normalise, parse_number, strip_latex

EIGHTEEN = [
    "18", " 18\n", "18.", "18.0", "18.00", "018", "+18", "1.8e1", "180E-1", "$18", r"\$18", "18$",
    "$ 18", "18\u20ac", "\u00a318", "$18$", r"\(18\)", r"\[ 18 \]", "**18**", "*18*", "`18`", '"18"',
    r"\text{18}", r"\mathbf{18}", r"\boxed{18}", r"18^\circ", r"18^{\circ}", "18\u00b0", "18%", "18 %",
    r"18\%", "18 dollars", "18 dollars.", r"18\text{ dollars}", "18 cm", "18cm", "18 cm^2", "18 cm\u00b2",
    r"18 \text{ cm}^2", "18 km/h", "18 miles per hour", "x = 18", "x=18", "Answer: 18", "The answer is 18",
    "The answer is $18.", "36/2", r"\frac{36}{2}", r"\dfrac{36}{2}", "\uff11\uff18", "18,", r"18\,\text{kg}",
    "= 18", "=18", "== 18", ": 18", r"\approx 18", "18 \u00b0C", "18\u2103", r"18^\circ C", r"18^{\circ}\text{C}",
    "18 \u00b0F", "18\u00b0 K", r"17.\overline{9}", r"1.8 \times 10^1", "1.8 \u00d7 10\u00b9", r"180\cdot10^{-1}", "180*10**-1",
]  # fmt: skip
NUMBERS = [
    ("$1,000.50", Fraction("1000.5")),
    ("1 000", 1000),
    ("1\u00a0000", 1000),
    ("12 345 678", 12345678),
    ("1,234,567", 1234567),
    ("1{,}000", 1000),
    (r"1\,000", 1000),
    (r"10,\!000", 10000),
    ("50 %", 50),
    ("3/4", Fraction(3, 4)),
    ("3 / 4", Fraction(3, 4)),
    (r"\frac{3}{4}", Fraction(3, 4)),
    (r"\frac34", Fraction(3, 4)),
    (r"-\frac{3}{4}", Fraction(-3, 4)),
    ("3 1/2", Fraction(7, 2)),
    (r"3\frac{1}{2}", Fraction(7, 2)),
    ("-3 1/2", Fraction(-7, 2)),
    ("3\u00bd", Fraction(7, 2)),
    ("\u00be", Fraction(3, 4)),
    ("-18", -18),
    ("- 18", -18),
    ("\u221218", -18),
    ("\u201318", -18),
    ("-$18", -18),
    ("$-18", -18),
    (".5", Fraction(1, 2)),
    ("1e3", 1000),
    ("1.5e-3", Fraction(3, 2000)),
    ("0", 0),
    ("-0", 0),
    (r"0.\overline{3}", Fraction(1, 3)),
    (r"-0.\overline{3}", Fraction(-1, 3)),
    (r"x = 0.1\overline{6}", Fraction(1, 6)),
    (r"0.\overline{142857}", Fraction(1, 7)),
    (r"12.3\overline{45}", Fraction(12222, 990)),
    (r".\bar{3}", Fraction(1, 3)),
    (r"0.\bar3", Fraction(1, 3)),
    (r"0.\dot{3}", Fraction(1, 3)),
    ("0.(3)", Fraction(1, 3)),
    ("0.333...", Fraction(1, 3)),
    ("0.1666\u2026", Fraction(1, 6)),
    (r"0.333\ldots", Fraction(1, 3)),
    (r"1.602\times 10^{-19}", Fraction("1.602e-19")),
    ("1.602 \u00d7 10\u207b\u00b9\u2079", Fraction("1.602e-19")),
    ("3 x 10^8", 300_000_000),
    ("9" * 100, 10**100 - 1),
]
NO_NUMBERS = [
    "", " ", ".", "-", "$", "%", "x", "eighteen", "17, 18, 19", "17 18", "17,18", "17;18", "18 or 19",
    "17 and 18", "18 and a half", "3,14", "0,500", "1,00", "1,0000", "12,34,567", "1.000.000", "1 00",
    "1/0", "1/2/3", "1e999", "1e-101", "--18", "-$-18", "18x", "18 x", "2n", "18k", "5M", "18 million",
    "18 hundred", "2 dozen", "2 pi", "18!", "(18)", "5**2", "5^2", "5\u00b2", "x_2", "3+4", "3*6", "nan",
    "inf", "0x12", "1_000", "10:30", "\u2460", "18 = 17", "18 %%", "9" * 101, "\x00", "\ud800", "18\x0019",
    "\u0661\u0668 19", "42_8", "42_{8}", "42\u2088", "0x2a", "0b101010", "0o52", "17 = 18", "18 = 18 = 18", "\u2260 18",
    "3.14...", "0.33...", r"0.\overline{AB}", r"\overline{3}", r"0.\overline{}", r"5^2 \times 10^3", r"2 \times 10^{101}",
]  # fmt: skip


@pytest.mark.parametrize("text", EIGHTEEN)
def test_numbers_are_parsed_with_units_and_markup(text: str) -> None:
    assert parse_number(text) == 18


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert parse_number(text) is None


@given(st.integers(-(10**12), 10**12))
@settings(deadline=None)
def test_every_integer_is_read_however_it_is_written(number: int) -> None:
    forms = [
        f"{number}",
        f"{number:,}",
        f"{number:,}".replace(",", " "),
        f"${number:,}.00",
        f"{number}/1",
    ]
    assert [parse_number(form) for form in forms] == [number] * len(forms)


LAST = [
    ("The answer is 18.", "18"),
    ("So she makes 18 dollars", "18"),
    ("It costs $1,000.", "1,000"),
    ("It costs $1,000.50!", "1,000.50"),
    ("that is 50%", "50"),
    ("use 3/4 cup", "3/4"),
    (r"so \frac{3}{4}", "3/4"),
    (r"so $-\frac{3}{4}$.", "-3/4"),
    ("3 1/2 hours", "3 1/2"),
    ("x = -3", "-3"),
    ("it is \u22123", "-3"),
    ("$-5", "-5"),
    ("-$5", "-5"),
    ("1e5 metres", "1e5"),
    ("3 + 4 = 7", "7"),
    ("area 18 cm^2.", "18"),
    ("area 18 m\u00b2", "18"),
    ("18 tons of CO2", "18"),
    ("18 on the 2nd day", "18"),
    ("17, 18, 19", "19"),
    ("3 of 12.", "12"),
    ("the sum is 5\n- 18", "18"),
    ("- 18 apples", "18"),
    ("Step 1: 18", "18"),
    ("**18**", "18"),
    ("the answer is $18$.", "18"),
    (r"\text{18}", "18"),
    ("1 000 people", "1 000"),
    ("It is 12 500.", "12 500"),
    ("It is 12 500, as said.", "12 500"),
    ("It is 12 500.75.", "12 500.75"),
    ("(18)", "18"),
    ("18!", "18"),
    (r"about 1.8 \times 10^{1} metres", "1.8e1"),
    ("\uff15", "5"),
    ("x" * 5000 + " 18", "18"),
]
NO_LAST = [
    "", "no number", "5**2", "3.14159 * 5**2", "5^2", "3 + 4", "2 \u00d7 3", r"3 \times 4", "5 * (3", "5-18",
    "10:30", "3,14", "1.2.3", "1/2/2024", "x-18", "18 million", "18k", "18x", "1/0", "CO2", "18th",
    "9" * 5000, "18" + "x " * 2000, r"18 \sqrt{2}", r"18 \sqrt2", "18 \u221a2", "18 log(2)", r"18 \sin(-2)",
    "it is 42_8", "it is 42_{8}.", "it is 42\u2088", "it is 0x2a",
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), LAST)
def test_the_last_number_is_found(text: str, number: str) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("text", NO_LAST)
def test_what_ends_in_no_number_of_its_own_has_none(text: str) -> None:
    assert last_number(text) is None


@given(st.text(st.sampled_from("0123456789.,/-+* $%xe^{}\\\n")))
@settings(deadline=None)
def test_the_last_number_can_always_be_read(text: str) -> None:
    found = last_number(text)
    assert found is None or parse_number(found) is not None


FOUND = [
    ("<think>1</think><answer>18</answer>", "18"),
    ("<answer>18</answer> yes: <answer> 18\n</answer>", "18"),
    ("<think><answer>17</answer></think><answer>18</answer>", "18"),
    ("<answer>18</answer> 19 \\boxed{20} #### 21", "18"),
    ("<answer>\\boxed{18}</answer>", "18"),
    ("<answer>x > 3</answer>", "x > 3"),
    (r"So \boxed{18}. And 19.", "18"),
    (r"\boxed{17} \boxed{18}", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{18}", "18"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{18 or \boxed{19}}", "19"),
    ("3 + 4\n#### 18\nbye 19", "18"),
    ("####\n18", "18"),
    ("#### 17\n#### 18", "18"),
    ("#### The answer is 18.\n", "The answer is 18."),
    ("#### x^2 + 18", "x^2 + 18"),
    ("#### Step 3: add\nThis makes 18.", "18"),
    ("#### **Conclusion**\nThis makes 18.", "18"),
    ("reasoning with 17</think>18", "18"),
    ("<reasoning>17</reasoning><answer>18</answer>", "18"),
    ("<think>17</think>The answer is 18.", "18"),
    ("<tool_call>calculator(expression='3*6')</tool_call>", "18"),
    ("calculator('3*6')", "18"),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "6**2/2"}}</tool_call>', "18"),
    ("<tool_call>search(query='7')</tool_call> It is 18.", "18"),
    (
        "<think>S = 78.54</think>\n<tool_call>calculator(expression='3.14159 * 5**2')</tool_call>",
        "314159/4000",
    ),
]
NOT_FOUND = [
    "<answer>17</answer> no: <answer>18</answer>",
    "<answer></answer> \\boxed{18}",
    '<answer hidden="18">unknown</answer>',
    "<answer>18",
    "",
    "nothing",
    "<think>18",
    "<think>18</think>",
    "<think>\\boxed{18}</think>",
    "<think>a</think><think>18",
    "<think>#### 18</think> done",
    "<answer> </answer>",
    "<tool_call>search(query='18')</tool_call>",
    "<tool_call>calculator(expression='95**87**64')</tool_call>",
    "<tool_call>calculator(expression='x')</tool_call>",
    "calculator(18)",
    "f(18)",
]


@pytest.mark.parametrize(("text", "answer"), FOUND)
def test_the_final_answer_is_extracted_by_style(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", NOT_FOUND)
def test_no_answer_is_extracted_from_thinking_or_tool_arguments(text: str) -> None:
    assert extract_answer(text) is None


@pytest.mark.parametrize(
    ("style", "answer"),
    [("answer", "1"), ("boxed", "2"), ("hashes", "3"), ("number", "3"), ("call", None)],
)
def test_a_style_can_be_required(style: str, answer: str | None) -> None:
    assert extract_answer("<answer>1</answer> \\boxed{2}\n#### 3", (style,)) == answer


def test_unknown_styles_and_none_at_all_are_config_errors() -> None:
    check_styles(STYLES)
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        check_styles(("box",))
    with pytest.raises(ConfigError, match="the option `styles` is empty"):
        check_styles(())


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("x\u00b2", "x^{2}"),
        ("10\u207b\u00b3", "10^{-3}"),
        ("x\u2082", "x_2"),
        ("\uff21\uff0b\uff11", "A+1"),
        ("\u2460", "\u2460"),
        ("e\u0301", "e\u0301"),
    ],
)
def test_digits_keep_their_rank_in_plain_characters(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_extracted_text_is_the_answer_tag_or_all_after_the_thinking() -> None:
    assert extract_text("<think>a</think> b ") == "b"
    assert extract_text("<think>a</think> b <answer>c</answer> d") == "c"
    assert extract_text("<answer></answer> b") == ""


HOSTILE = [
    "<" * 1_000_000, "<answer>" * 125_000, "</answer>" * 110_000, "<answer></answer>" * 60_000,
    "\\boxed{" * 140_000, "\\boxed{" + "{}" * 500_000, "#" * 1_000_000, "#### " * 200_000, "1" * 1_000_000,
    "1 " * 500_000, "1,000" * 200_000, "(" * 1_000_000, "f(" * 500_000, "{" * 1_000_000, "\u0301\u0323" * 500_000,
    "\u0301" * 500_000 + "\u0323" * 500_000, "\uff11" * 1_000_000, "\u00b2" * 1_000_000, "\ud800" * 1_000_000,
    "\x00" * 1_000_000, "\\frac{" * 160_000, "\\text{" * 160_000, " " * 1_000_000, "-" * 1_000_000, "<tool_call>" * 90_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=[ascii(t[:12]) for t in HOSTILE])
def test_hostile_text_takes_no_time(text: str) -> None:
    start = time.thread_time()
    extract_answer(text)
    last_number(text)
    parse_number(text)
    extract_text(text)
    assert time.thread_time() - start < 0.3


@given(text=st.text(alphabet="\\{}^°~\t\r ,;:!$%2a.", max_size=12))
def test_plain_texts_are_known_as_such_without_looking_for_any_latex(text: str) -> None:
    quick = strip_latex(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number, "_ANY_LATEX", re.compile(""))  # as if there were some everywhere
        assert strip_latex(text) == quick
