from __future__ import annotations

import importlib.util
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards.math.numeric_equality import is_tractable, same_symbolically
from covey.rewards.math_answer import MathAnswer
from covey.rewards.score import Score
from covey.rewards.text_match import ExactText, FuzzyText, letter_similarity, word_overlap
from covey.sandbox import program
from covey.types import Prompt


def prompt(answer: str, **info: Any) -> Prompt:
    return Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target=answer, info=info
    )


def judge(text: str, answer: str, **options: Any) -> Score:
    return MathAnswer(**options)(prompt(answer), text)


def right(given_answer: str, answer: str, **options: Any) -> bool:
    return judge(f"<answer>{given_answer}</answer>", answer, **options).success


def forms(number: int) -> list[str]:
    return [
        f"3 + 4\n#### {number}",
        f"#### {number:,}",
        rf"So \boxed{{{number}}}.",
        f"<think>7 or 8</think><answer>{number}</answer>",
        f"<answer>${number}</answer>",
        f"The answer is {number}.",
        f"<answer>{number} dollars</answer>",
        f"<answer>{number}.00</answer>",
        f"Therefore it is ${number:,}.",
        f"**{number:,}**",
    ]


def test_whole_numbers_are_correct_in_every_style_and_wrong_if_off_by_one() -> None:
    draw = random.Random(7)
    reward = MathAnswer(symbolic=False)
    for _ in range(200):
        number = draw.randint(-9, 10 ** draw.randint(1, 9))
        asked = prompt(str(number))
        assert [reward(asked, form).success for form in forms(number)] == [True] * 10
        for other in (number - 1, number + 1):
            assert [reward(asked, form).success for form in forms(other)] == [False] * 10


@pytest.mark.parametrize(
    ("given_answer", "answer", "tolerance", "success"),
    [
        ("1000", "1000", 1e-2, True),
        ("1001", "1000", 1e-2, False),
        ("1000.001", "1000", 1e-2, False),
        ("999999999999999999998", "999999999999999999999", 1e-2, False),
        ("0", "0", 1e-2, True),
        ("0.001", "0", 1e-2, False),
        ("78.53975", "78.54", 1e-2, True),
        ("78.53975", "78.54", 1e-6, False),
        ("77.7546", "78.54", 1e-2, True),
        ("77.7545", "78.54", 1e-2, False),
        ("79.3254", "78.54", 1e-2, True),
        ("-78.54", "78.54", 1e-2, False),
        ("0.5", "1/2", 0.0, True),
        ("0.3333333", "1/3", 1e-6, True),
        ("0.33333", "1/3", 1e-6, False),
        ("0.3", "1/3", 0.0, False),
    ],
)
def test_the_tolerance_is_relative_and_does_not_hold_for_whole_numbers(
    given_answer: str, answer: str, tolerance: float, success: bool
) -> None:
    assert right(given_answer, answer, tolerance=tolerance) == success


def test_a_call_of_the_calculator_counts_as_its_value() -> None:
    text = (
        "<think>\nThe area of the circle is 78.54.\n</think>\n"
        "<tool_call>calculator(expression='3.14159 * 5**2')</tool_call>"
    )
    assert judge(text, "78.54", tolerance=1e-2).reward == 1.0
    assert judge(text, "2", tolerance=1e-2).reward == 0.0
    assert judge(text, "78.54", tolerance=1e-2, styles=("number",)).parts["found"] == 0.0


RIGHT = [
    (r"\sqrt{324}", "18"),
    ("3*6", "18"),
    ("2^{10}", "1024"),
    ("10!", "3628800"),
    (r"3\cdot 10^8", "300000000"),
    (r"\log_2 8", "3"),
    (r"\sin^2 x+\cos^2 x", "1"),
    ("x=3", "3"),
    ("3=x", "x=3"),
    ("3", "x=3"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"\sqrt{2}", "1.414213562"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x\u00b2+1", "x^2+1"),
    ("1-x", "-x+1"),
    ("0.75x", r"\frac{3}{4}x"),
    (r"$\frac{1}{2}x$", "x/2"),
    (r"\dfrac{x+1}{2}", r"\frac{x}{2}+\frac12"),
    ("y=2x+1", "2x+1"),
    ("e^{x+y}", "e^x e^y"),
    ("3+2i", "2i+3"),
    ("2x+3y=5", "5=2x+3y"),
    ("4x+6y=10", "2x+3y=5"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2,1"),
    (r"5 \pm 2", r"\{3,7\}"),
    ("(1,2)", "( 1 , 2 )"),
    (r"\left(2,3\right)", "(2,3)"),
    ("(0.5, 3)", r"(\frac{1}{2},3)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    ("[0,1)", r"\left[0,1\right)"),
    (r"x \in [0,1)", "[0,1)"),
    (r"(3,\infty)", "x>3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \\\, 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\emptyset", r"\{\}"),
    (r"\text{Tuesday}", "Tuesday"),
    ("tuesday.", "Tuesday"),
    ("(A)", "A"),
    ("C", r"\text{(C)}"),
    # one value in other notations
    (r"0.\overline{3}", r"\frac13"),
    (r"0.\overline{3}x", r"\frac{x}{3}"),
    ("0.333...", "1/3"),
    ("√2", r"\sqrt{2}"),
    ("2√3", r"2\sqrt{3}"),
    ("√(x+1)", r"\sqrt{x+1}"),
    ("∛8", "2"),
    ("√16", "4"),
    ("∞", r"\infty"),
    (r"\varnothing", r"\emptyset"),
    (r"\varnothing", r"\{\}"),
    ("∅", r"\varnothing"),
    ("x ≥ 3", r"x \geq 3"),
    ("\uff13·\uff16", "18"),
    ("1.602 \u00d7 10⁻¹⁹", "1.602e-19"),
    # units
    ("42 °C", "42"),
    ("42", "42 °C"),
    (r"\frac{\pi}{2}\text{ rad}", r"\frac{\pi}{2}"),
    (r"\frac{\pi}{2} \text{ radians}.", r"\frac{\pi}{2}"),
    (r"\frac{\pi}{2} rad", r"\frac{\pi}{2}"),
    (r"\frac{\pi}{2}", r"\frac{\pi}{2}\text{ rad}"),
    (r"5\pi\text{ m/s}", r"5\pi"),
    (r"2\sqrt{3}\text{ cm}^2", r"2\sqrt{3}"),
    # equations that state the value
    ("= 42", "42"),
    (r"= \frac{\pi}{2}", r"\frac{\pi}{2}"),
    ("6*7 = 42", "42"),
    ("42 = 6*7", "42"),
    ("x = 6*7 = 42", "42"),
    ("x = 6*7 = 42", "x = 42"),
    ("42 = x", "42"),
    ("x := 42", "42"),
    ("f(3) = 42", "42"),
    ("x_1 = 42", "42"),
    (r"\theta = \frac{\pi}{2}", r"\frac{\pi}{2}"),
    (r"\cos\theta = \frac12", r"\frac12"),
    ("x^2+y^2 = 25", "25"),
    ("y = 1+x+x = 2x+1", "y = 2x+1"),
    ("(x+1)^2 = x^2+2x+1", "x^2+2x+1"),
    ("(x, y) = (3, 4)", "(3, 4)"),
    # bases
    ("52_8", "52_{8}"),
    ("52₈", "52_8"),
    ("52", "52_8"),
    ("42_{10}", "42"),
    ("0x2A", "0x2a"),
    ("42", "f(3) = 42"),
    ("42", "42 = 6*7"),
    # known units and names
    *(
        (f"42 {unit}", "42")
        for unit in (
            "apples",
            "people",
            "years old",
            "dollars per hour",
            "square meters",
            "cubic feet",
            "km/h",
            "percent",
            "minutes",
            "m^2",
            "cents each",
            "books in total",
            "pounds left",
        )
    ),
    (r"42 \text{ miles per hour}", "42"),
    ("Total cost = 42", "42"),
    (r"\text{Area} = 42", "42"),
    ("AB = 42", "42"),
    ("The answer is 42 euros.", "42"),
    # ellipses
    (r"\{1,2,3,\ldots\}", r"\{1, 2, 3, \dots\}"),
    (r"\{1,2,3,...\}", r"\{1,2,3,\ldots\}"),
    # solved inequalities
    ("x>2", r"(2,\infty)"),
    ("2<x", r"(2,\infty)"),
    ("x \u2265 2", r"[2,\infty)"),
    ("x<2", r"(-\infty,2)"),
    (r"-3\le x<4", "[-3,4)"),
    ("4 > x \u2265 -3", "[-3,4)"),
    ("[-3,4)", r"-3\le x<4"),
    ("2>x>1", "1<x<2"),
    (r"x \neq 2", r"(-\infty,2)\cup(2,\infty)"),
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
    ("x>2", r"x \in (2,\infty)"),
    (r"\{x \mid x>2\}", r"(2,\infty)"),
    # whole numbers as powers
    (str(2**100), "2^{100}"),
    ("2^{100}", str(2**100)),
    ("4^{50}", "2^{100}"),
    (str(-(2**100)), "-2^{100}"),
    (rf"\frac{{1}}{{{2**100}}}", "2^{-100}"),
    (str(2**100 - 1), "2^{100}-1"),
    ("265252859812191058636308480000000", "30!"),
    ("100891344545564193334812497256", r"\binom{100}{50}"),
    ("1e12", "10^{12}"),
    ("10^{12}", "1e12"),
    ("1,000,000,000,000", "10^12"),
]
WRONG = [
    ("17, 18", "18"),
    (r"17 \text{ or } 18", "18"),
    ("{17,18}", "18"),
    ("18 and 19", "18"),
    ("17 18", "35"),
    ("eighteen", "18"),
    ("18x", "18"),
    ("18!", "18"),
    ("9^{9^{9}}", "18"),
    (r"\frac{1}{0}", "18"),
    ("}{", "18"),
    ("nan", "18"),
    (r"18\%", "0.18"),
    (r"2\pi", "6"),
    (r"\sqrt{2}", "1.41"),
    (r"\sqrt{3}", r"\sqrt{2}"),
    (r"\frac{\pi}{3}", r"\frac{\pi}{2}"),
    ("x^2+2x", "(x+1)^2"),
    ("x", "y"),
    ("x_1", "x_2"),
    ("x^{2}", "x^{3}"),
    ("e^{x}", "e^{-x}"),
    (r"\sin x", r"\cos x"),
    ("3-2i", "3+2i"),
    ("2x+3y=6", "2x+3y=5"),
    ("x>4", "x>3"),
    ("x<3", "x>3"),
    (r"\infty", r"-\infty"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("(2,1)", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    (r"(0,\infty)", r"[0,\infty)"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 3 \\ -4 \end{pmatrix}"),
    (
        r"\begin{pmatrix} 1 & 4 \\ 2 & 3 \end{pmatrix}",
        r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}",
    ),
    (r"x \\ y", "y x"),
    (r"\text{Monday}", r"\text{Tuesday}"),
    ("seat", "east"),
    ("B", "A"),
    ("A, B", "A"),
    ("A or B", "A"),
    # contradictions
    ("41=42", "42"),
    ("42=41", "42"),
    ("41=42", "41"),
    ("41 = 42", "x = 42"),
    ("\uff14\uff11\uff1d\uff14\uff12", "42"),
    (r"41 \equiv 42", "42"),
    ("x = 41 = 42", "42"),
    ("x = 41 = 42", "x = 42"),
    ("x = 41 cm = 42", "42"),
    (r"\sqrt{2} = \sqrt{3}", r"\sqrt{3}"),
    ("y = 2x+1 = 3x", "3x"),
    ("5 = 5", "2x+3y = 5"),
    ("x = x+3", "x+3"),
    # unsolved equations
    ("2x = 42", "42"),
    ("-x = 42", "42"),
    (r"x \neq 42", "42"),
    ("x ≠ 42", "42"),
    # other bases
    ("42_8", "42"),
    ("42_{8}", "42"),
    ("42₈", "42"),
    ("52_8", "42"),
    ("42", "52_8"),
    ("52_7", "52_8"),
    ("42_8 + 0", "42"),
    ("0x2a", "42"),
    ("0x2a", "0"),
    ("0b1", "0"),
    ("0x2a + 42", "42"),
    # nearly 0 is not 0
    ("0.0", "1.602e-19"),
    ("0", "10^{-20}"),
    ("1e-16", "2^{-60}"),
    (r"0.\overline{3}", "0.3"),
    ("√3", r"\sqrt{2}"),
    (r"\frac{\pi}{3}\text{ rad}", r"\frac{\pi}{2}"),
    (r"x\text{ or }y", "xy"),
    (r"3\text{ million}", "3"),
    # words that change or deny the value
    *(
        (f"42 {word}", "42")
        for word in (
            "is wrong",
            "wrong",
            "is not the answer",
            "no",
            "nope",
            "false",
            "at least",
            "at most",
            "or more",
            "or less",
            "more",
            "times",
            "lakh",
            "crore",
            "gross",
            "grand",
            "dozen",
            "score",
            "pairs",
            "mil",
            "bn",
            "trillionths",
            "eighths",
            "base eight",
            "in base 8",
            "octal",
            "in binary",
            "hex",
            "negative",
            "below zero",
            "degrees below zero",
            "ago",
            "BC",
            "mod 43",
            "squared",
            "(wrong)",
            "per",
            r"\text{ is wrong}",
            r"\text{ lakh}",
            r"\mathrm{gross}",
            r"\text{ base eight}",
        )
    ),
    *(
        (f"{word} 42", "42")
        for word in (
            "wrong:",
            "wrong =",
            "not",
            "not:",
            "not =",
            "NOT =",
            "no:",
            "false:",
            "half =",
            "twice:",
            "minus:",
            "opposite =",
            "reciprocal:",
            "the answer is not:",
            "x is not",
            "if x =",
            "at least",
            "wrong answer =",
            r"\text{wrong: }",
            r"\neg",
            ">",
            "<",
        )
    ),
    ("wrong = \\sqrt{2}", r"\sqrt{2}"),
    ("half of it = \\sqrt{2}", r"\sqrt{2}"),
    # ellipses
    (r"{1,2,3,\ldots}", r"\{1,2,3\}"),
    (r"\{1,2,3,\ldots\}", r"\{1,2,3\}"),
    (r"\{1,2,3\}", r"\{1,2,3,\ldots\}"),
    (r"\{1,2,3,\ldots\}", r"\{1,3,2,\ldots\}"),
    (r"\{1,2,3,\ldots,10\}", r"\{1,2,3,10\}"),
    (r"1,2,3,\ldots", "1,2,3"),
    (r"(1,2,\ldots)", "(1,2)"),
    (r"42 \ldots", "42"),
    ("42...", "42"),
    ("3.14...", "3.14"),
    # inequalities
    ("x>2", r"[2,\infty)"),
    ("x>3", r"(2,\infty)"),
    ("x<2", r"(2,\infty)"),
    (r"x \ge 2", r"(2,\infty)"),
    ("1<x>2", "(1,2)"),
    ("2x>4", r"(2,\infty)"),
    ("2x-4<0", r"(-\infty,2)"),
    ("y>2", "x>2"),
    ("x>a", r"(2,\infty)"),
    # large numbers
    (str(2**100 + 1), "2^{100}"),
    ("4^{51}", "2^{100}"),
    ("1e13", "10^{12}"),
    ("1e-12", "10^{12}"),
    ("2^{1000}", "2^{1001}"),
]


@pytest.mark.parametrize(("given_answer", "answer"), RIGHT)
def test_equal_formulas_are_correct(given_answer: str, answer: str) -> None:
    assert right(given_answer, answer)


@pytest.mark.parametrize(("given_answer", "answer"), WRONG)
def test_other_formulas_are_wrong(given_answer: str, answer: str) -> None:
    assert not right(given_answer, answer)


@pytest.mark.parametrize(
    ("answer", "asked", "success"),
    [
        ("42 gizmos", "How many gizmos does Ann have?", True),
        ("42 blue gizmos", "How many blue gizmos are left?", True),
        ("42 more gizmos", "How many more gizmos does Ann need?", True),
        ("42 gizmos", "What is 6 times 7?", False),
        ("42 more", "How many gizmos does Ann have?", False),
        ("42 dozen", "How many dozen eggs are there?", False),
        ("42 wrong gizmos", "How many gizmos are wrong?", False),
    ],
)
def test_what_the_question_asks_for_counts_as_a_unit(
    answer: str, asked: str, success: bool
) -> None:
    question = replace(prompt("42"), messages=({"role": "user", "content": asked},))
    assert MathAnswer()(question, f"<answer>{answer}</answer>").success == success


def test_a_number_that_changes_its_meaning_in_a_sentence_is_no_answer() -> None:
    for text in (
        "So it is 42 lakh.",
        "It is 42 gross.",
        "The answer 42 is wrong.",
        "It is not 42.",
    ):
        assert not judge(text, "42").success, text
    for text in ("So it is 42 marbles.", "The answer is 42 at last.", "Note: 42"):
        assert judge(text, "42").success, text


def test_only_the_extracted_answer_is_compared() -> None:
    text = r"It could be $\sqrt{2}$ or $\sqrt{3}$. So \boxed{\sqrt{5}}"
    assert judge(text, r"\sqrt{5}").success
    assert not judge(text, r"\sqrt{2}").success
    assert judge(r"so $\sqrt{2}$", r"\sqrt{2}").parts == {"accuracy": 0.0, "found": 0.0}


def test_parts_distinguish_a_wrong_answer_from_no_answer() -> None:
    assert judge("17", "18") == Score(
        reward=0.0, success=False, parts={"accuracy": 0.0, "found": 1.0}
    )
    assert judge("<think>18", "18").parts == {"accuracy": 0.0, "found": 0.0}


def test_the_target_may_be_a_worked_solution() -> None:
    assert right("1000", "3 + 997 = 1000\n#### 1,000")
    assert right("1000", r"Clearly \boxed{1000}.")


BOMBS = [
    "10^{10^{10}}", "10^10^10", "10**10**10", "10^(10^10)", "9^{9^{9}}", "9^{9}^{9}", "9^{(9)^{(9)}}",
    r"9^{9^{\left(9\right)}}", "e^{e^{e^{100}}}", r"\exp(\exp(\exp(100)))", "9999999!", "(9!)!", "9!!", "9^{9!}",
    r"\binom{999999999}{499999999}", r"\sum_{k=1}^{10^9} k", r"\prod_{k=1}^{99} k", r"\Gamma(10^{9})",
    "9^{99999}", r"9^{9999 \cdot 9999}", "((9^{999})^{99})^{99}", "(x+y+z+w)^{99}", "((x+y+z)^{9})^{9}", "9" * 299,
    "(" * 140 + ")" * 140, "{" * 5000, "x" * 301, r"\sqrt{" * 12 + "2" + "}" * 12,
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS, ids=[b[:24] for b in BOMBS])
def test_bombs_are_wrong_at_once(bomb: str) -> None:
    assert not is_tractable(bomb)
    start = time.thread_time()
    assert judge(rf"\boxed{{{bomb}}}", r"\sqrt{2}").reward == 0.0
    assert time.thread_time() - start < 0.05


@pytest.mark.parametrize(
    "formula",
    [
        "2^{100}", "x^{10}+x^{9}+x^{8}+x^7", "e^{x^2}", "(x+1)^{99}", "20!", r"\binom{10}{3}", r"10^{-12}",
        r"\frac{(x+1)^2}{3}-(x-2)^2+x+5", "2^{3x+1}", r"x \neq 3", "n!", r"\exp(x)-\exp(-x)", r"\sqrt{1+\sqrt{2+\sqrt{3}}}",
    ],
)  # fmt: skip
def test_ordinary_formulas_are_tame(formula: str) -> None:
    assert is_tractable(formula)


@given(st.text(st.sampled_from("0123xy^!{}()+-*\\ ,=<"), max_size=30))
@settings(deadline=None, max_examples=60)
def test_any_formula_is_scored(text: str) -> None:
    assert judge(f"<answer>{text}</answer>", r"\sqrt{2}+x").reward in (0.0, 1.0)


def test_nothing_is_logged_or_printed(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("x+", r"\frac{1}{", "a_{b}", r"\unknown{x}"):
        right(text, r"\sqrt{7}+x")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_without_math_verify_or_isolation_the_reward_says_at_once_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The error must come before the first completion, which would have no score.
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'covey\[tasks\]', or set symbolic = f"):
            MathAnswer()
        assert right("18", "18", symbolic=False)
    monkeypatch.setattr(program, "isolation_problem", lambda: "there is no bwrap")
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*unsafe = true.*symbolic = fal"):
        MathAnswer()
    assert not right(r"(3,\infty)", "x>3", symbolic=False)
    assert right(r"(3,\infty)", "x>3", unsafe=True)


HANGS = [(r"\binom{x}{999}", "x"), (r"\sqrt{9999^{9999}+1}", "x>1"), ("999!", r"\log_2 3")]


@pytest.mark.parametrize(("given", "expected"), HANGS)
def test_formulas_that_would_hang_are_wrong_at_once(given: str, expected: str) -> None:
    start = time.monotonic()
    assert judge(rf"\boxed{{{given}}}", expected).reward == 0.0
    assert time.monotonic() - start < 1


def test_formulas_that_do_hang_are_wrong_and_the_next_is_scored() -> None:
    program.require_isolation()
    assert not same_symbolically(r"\sqrt{9999^{9999}+1}", r"\log_2 3")
    assert same_symbolically(r"(7, \infty)", "x > 7")


def test_quick_unless_symbolic_and_options_are_checked() -> None:
    assert (MathAnswer().quick, MathAnswer(symbolic=False).quick) == (False, True)
    with pytest.raises(ConfigError, match=r"tolerance = -1"):
        MathAnswer(tolerance=-1)
    with pytest.raises(ConfigError, match="not a known answer style"):
        MathAnswer(styles=("tags",))
    with pytest.raises(ConfigError, match=r"threshold = 0"):
        FuzzyText(threshold=0)


@pytest.mark.parametrize("reward", [MathAnswer, ExactText, FuzzyText])
def test_a_prompt_without_a_target_is_an_error(reward: Any) -> None:
    with pytest.raises(ValueError, match="'p' has n"):
        reward()(prompt(" "), "18")


@pytest.mark.parametrize(
    ("text", "options", "success"),
    [
        ("Paris", {}, True),
        (" Paris\n", {}, True),
        ("<think>Rome?</think><answer>Paris</answer> I think", {}, True),
        ("<think>Paris</think>", {}, False),
        ("It is Paris", {}, False),
        ("paris", {}, False),
        ("paris", {"ignore_case": True}, True),
        ("Paris.", {}, False),
        ("Paris.", {"ignore_punctuation": True}, True),
        ("the  City\nof Light", {}, True),
        ("the  City of Light", {"ignore_blanks": False}, False),
        ("Rome", {}, False),
        ("", {"ignore_punctuation": True}, False),
    ],
)
def test_exact_text(text: str, options: dict[str, bool], success: bool) -> None:
    asked = prompt("Paris", answers=["the City of Light"])
    assert ExactText(**options)(asked, text).success == success


@pytest.mark.parametrize(
    ("one", "other", "words", "letters"),
    [
        ("a b c", "a b c", 1.0, 1.0),
        ("c b a", "a b c", 1.0, 0.6),
        ("", "a", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("a a a a", "a", 0.4, 0.25),
        ("kitten", "sitting", 0.0, 8 / 13),
    ],
)
def test_similarities(one: str, other: str, words: float, letters: float) -> None:
    assert word_overlap(one.split(), other.split()) == pytest.approx(words)
    assert letter_similarity(one, other) == pytest.approx(letters)
    assert letter_similarity(other, one) == pytest.approx(letters)


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
@settings(deadline=None)
def test_letters_are_compared_by_the_longest_common_subsequence(one: str, other: str) -> None:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
            )
    total = len(one) + len(other)
    assert letter_similarity(one, other) == (2 * table[-1][-1] / total if total else 1.0)


def test_fuzzy_text_takes_the_nearest_and_padding_never_helps() -> None:
    reward = FuzzyText()
    asked = prompt("the quick brown fox", answers=["a lazy dog"])
    assert reward(asked, "A  lazy dog").reward == 1.0
    near = reward(asked, "the quick brown fix")
    assert near.reward == pytest.approx((0.75 + 36 / 38) / 2)
    assert not near.success
    assert FuzzyText(threshold=0.8)(asked, "the quick brown fix").success
    padded = reward(asked, "a lazy dog" + " and so on" * 1000)
    assert padded.reward < 0.01
    long = "word " * 1000
    assert reward(prompt(long), long).reward == 1.0
    assert reward(prompt(long), long + long).reward == pytest.approx(0.5, abs=1e-3)


HOSTILE = [
    "<" * 1_000_000,
    "a " * 500_000,
    "\ud800\x00" * 500_000,
    "ab" * 500_000,
    "." * 1_000_000,
    "1" * 1_000_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[ascii(t[:4]) for t in HOSTILE])
@pytest.mark.parametrize(
    "reward",
    [
        MathAnswer(symbolic=False),
        ExactText(ignore_case=True, ignore_punctuation=True),
        FuzzyText(),
    ],
    ids=["math", "exact", "fuzzy"],
)
def test_hostile_text_takes_no_time(reward: Any, text: str) -> None:
    asked = prompt("ab " * 600)
    start = time.thread_time()
    assert 0.0 <= reward(asked, text).reward < 0.1
    assert time.thread_time() - start < 0.3
