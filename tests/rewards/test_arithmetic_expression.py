from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate, numbers_in

VALUES = [
    ("7", 7),
    (" 1 + 2 ", 3),
    ("2+3*4", 14),
    ("(2+3)*4", 20),
    ("2-3-4", -5),
    ("24/4/2", 3),
    ("1/3*3", 1),
    ("7/2", Fraction(7, 2)),
    ("0.1+0.2", Fraction(3, 10)),
    (".5*4", 2),
    ("5.", 5),
    ("-3+5", 2),
    ("+3", 3),
    ("3--2", 5),
    ("-(2+3)", -5),
    ("2*-3", -6),
    ("-+-4", 4),
    ("007", 7),
    ("6\u00d77", 42),
    ("6\u00b77", 42),
    ("8\u00f72", 4),
    ("8\u22122", 6),
    ("9" * 30, 10**30 - 1),
    ("(" * 50 + "1" + ")" * 50, 1),
    ("+".join(["1"] * 200), 200),
]
POWERS = [
    ("5**2", 25),
    ("5^2", 25),
    ("3.14159 * 5**2", Fraction("78.53975")),
    ("-2**2", -4),
    ("(-2)**2", 4),
    ("2**3**2", 512),
    ("2**-2", Fraction(1, 4)),
    ("2**-1**2", Fraction(1, 2)),
    ("0**0", 1),
    ("2**2048/2**2047", 2),
    ("(1/2)**3", Fraction(1, 8)),
]
BROKEN = {
    "empty": "",
    "blank": "  ",
    "nothing inside": "()",
    "ends early": "1+",
    "starts late": "*1",
    "two numbers": "1 2",
    "no operator": "2(3)",
    "open": "(1+2",
    "closed": "1+2)",
    "two points": "1.2.3",
    "point alone": ".",
    "comma": "1,000",
    "letters": "abs(1)",
    "underscore": "1_0",
    "hexadecimal": "0x1f",
    "exponent": "1e3",
    "equation": "1+2=3",
    "floor": "7//2",
    "remainder": "7%2",
    "call": "__import__('os')",
    "other digits": "\u0663+\u0664",
    "junk": "1+2;",
    "newline and junk": "1\n#",
    "nul": "1\x00",
    "surrogate": "\ud800",
    "division by zero": "1/0",
    "division by a zero sum": "1/(2-2)",
    "zero to a negative power": "0**-1",
    "broken exponent": "4**0.5",
}
HUGE = {
    "tower": "95**87**64",
    "tower in brackets": "(95**87)**64",
    "ten thousand brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "too deep": "(" * 51 + "1" + ")" * 51,
    "too deep to the right": "**".join(["1"] * 60),
    "long number": "9" * 101,
    "megabyte of digits": "9" * 1_000_000,
    "too many numbers": "+".join(["1"] * 201),
    "large power": "2**4096",
    "large exponent": "2**" + "9" * 30,
    "exponent of one": "1**5000",
    "small fraction": "2**-4097",
    "large product": "2**4000*2**4000",
    "product of powers": "*".join(["9**999"] * 100),
    "signs": "-" * 999,
    "megabyte of signs": "-" * 1_000_000,
}


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[t[:20] for t, _ in VALUES])
def test_arithmetic_is_exact(text: str, value: Fraction) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(("text", "value"), POWERS)
def test_powers_bind_as_in_python_and_only_where_they_are_allowed(
    text: str, value: Fraction
) -> None:
    assert evaluate(text, powers=True) == value
    with pytest.raises(ExpressionError, match="powers are not allowed"):
        evaluate(text)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_arithmetic_is_an_error(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, powers=True)


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_what_would_take_long_is_an_error_at_once(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(ExpressionError):
        evaluate(text, powers=True)
    assert time.thread_time() - start < 0.05


def trees() -> st.SearchStrategy[str]:
    def join(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(children, st.sampled_from("+-*/"), children).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        )

    return st.recursive(st.integers(0, 99).map(str), join, max_leaves=8)


@given(trees())
@settings(deadline=None)
def test_it_agrees_with_python(text: str) -> None:
    fractions = re.sub("[0-9]+", r"F(\g<0>)", text)
    try:
        expected = eval(fractions, {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            evaluate(text)
        return
    assert evaluate(text) == expected


@given(st.text(st.sampled_from("0123456789.+-*/^() \u00d7x"), max_size=40))
@settings(deadline=None)
def test_any_text_has_a_value_or_is_an_expression_error(text: str) -> None:
    try:
        value = evaluate(text, powers=True)
    except ExpressionError:
        return
    assert isinstance(value, Fraction)


def test_an_ellipsis_is_not_a_number() -> None:
    with pytest.raises(ExpressionError):
        evaluate("...")


def test_numbers_are_listed_with_repeats() -> None:
    assert numbers_in("(75 - 3) * 3 \u00d7 007") == [75, 3, 3, 7]
    assert numbers_in("+") == []


@pytest.mark.parametrize("text", ["2.5", "2.0", "a", "9" * 101, "1" * 1001])
def test_numbers_that_are_not_whole_or_no_numbers_are_errors(text: str) -> None:
    with pytest.raises(ExpressionError):
        numbers_in(text)
