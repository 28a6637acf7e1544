from __future__ import annotations

import math
import time
from array import array
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.sandbox import matches, read_expected, same_output
from covey.sandbox.harness import encode

EXACT = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.frozensets(st.integers() | st.text() | st.tuples(st.integers()), max_size=3).map(set)
)
NEAR = st.floats(allow_nan=False) | st.complex_numbers(
    allow_nan=False, allow_infinity=False, max_magnitude=1e9
)


def nested(leaves: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner, max_size=3)
        ),
        max_leaves=8,
    )


@given(nested(EXACT | NEAR))
@settings(deadline=None)
def test_plain_data_comes_through_unchanged(value: object) -> None:
    assert matches(value, encode(value).encode())


@given(nested(EXACT), nested(EXACT | NEAR))
@settings(deadline=None)
def test_where_no_float_is_expected_equal_is_what_python_calls_equal(
    one: object, other: object
) -> None:
    assert matches(one, encode(other).encode()) == (one == other)


class EqualToAll(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return "3"


@pytest.mark.parametrize(
    ("expected", "given_value", "same"),
    [
        ("3", 3, True),
        ("3", 3.0, True),
        ("3", 3.0000001, False),
        ("3.0", 3, True),
        ("3.0", 3.000001, True),
        ("3.0", 3.0001, False),
        ("0.0", 5.6e-17, True),
        ("0.0", 1e-9, False),
        ("1e-20", 2e-20, False),
        ("1.602e-19", 0.0, False),
        ("1.602e-19", 1.6020001e-19, True),
        ("-1e-300", 0, False),
        ("0.0", -0.0, True),
        ("1e-13+0j", 0, False),
        ("0j", 1e-13, True),
        ("0.5", Fraction(1, 2), True),
        ("3", Fraction(6, 2), True),
        ("0", Fraction(1, 3), False),
        ("0.3333333333", Fraction(1, 3), True),
        ("[0.5]", [Decimal("0.5")], True),
        ("0.1", Decimal("0.1"), True),
        ("3", Decimal("3.1"), False),
        ("1e999", Decimal("Infinity"), True),
        ("0.0", Decimal("NaN"), False),
        ("{1: 2}", {Fraction(1): Decimal(2)}, True),
        ("1", Decimal("1e99999"), False),
        ("[1, 2]", array("i", [1, 2]), True),
        ("(1, 2)", array("i", [1, 2]), True),
        ("[1, 2]", array("i", [2, 1]), False),
        ("{1, 2}", array("i", [1, 2]), False),
        ("1e10", 1e10 + 1e3, True),
        ("1e999", math.inf, True),
        ("1e999", 1e308, False),
        ("1.0", math.nan, False),
        ("1.0", 10**400, False),
        ("True", 1, True),
        ("None", 0, False),
        ("None", None, True),
        ("'3'", 3, False),
        ("3", "3", False),
        ("'3'", EqualToAll("4"), False),
        ("[1, 2]", (1, 2), False),
        ("(1, 2)", (1, 2), True),
        ("[1, 2]", [2, 1], False),
        ("[1, 2]", [1, 2, 3], False),
        ("[]", [], True),
        ("[]", (), False),
        ("{}", {}, True),
        ("{}", set(), False),
        ("set()", set(), True),
        ("{1, 2}", frozenset({2, 1}), True),
        ("{'a': [1.0]}", {"a": [1.0000001]}, True),
        ("{'a': 1}", {"a": 1, "b": 2}, False),
        ("{(1, 2): 3}", {(1, 2): 3}, True),
        ("b'ab'", bytearray(b"ab"), True),
        ("1+2j", 1 + 2j, True),
        (str(2**70), 2**70, True),
        (str(2**70), 2**70 + 1, False),
        ("'\\ud800'", "\ud800", True),
    ],
)
def test_comparison(expected: str, given_value: object, same: bool) -> None:
    assert matches(read_expected(expected), encode(given_value).encode()) == same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        ("3", np.int64(3), True),
        ("3", np.int8(4), False),
        ("0.5", np.float64(0.5), True),
        ("0.1", np.float32(0.1), True),
        ("0.5", np.longdouble(0.5), True),
        ("1e999", np.float32("inf"), True),
        ("True", np.bool_(True), True),
        ("1+2j", np.complex64(1 + 2j), True),
        ("'a'", np.str_("a"), True),
        ("3", np.array(3), True),
        ("[]", np.array([]), True),
        ("[0, 1, 2]", np.arange(3), True),
        ("(0, 1, 2)", np.arange(3), True),
        ("[0, 1, 3]", np.arange(3), False),
        ("[[1, 2], (3, 4.5)]", np.array([[1, 2], [3, 4.5]]), True),
        ("[1, 2, 3, 4]", np.array([[1, 2], [3, 4]]), False),
        ("[1]", np.array(1), False),
        ("{'a': [1]}", {np.str_("a"): np.array([np.int64(1)])}, True),
        ("{1, 2}", {np.int64(1), np.int64(2)}, True),
    ],
)
def test_results_of_numpy_are_the_numbers_that_they_hold(
    expected: str, value: object, same: bool
) -> None:
    assert matches(read_expected(expected), encode(value).encode()) == same


@pytest.mark.parametrize(
    "value", [object(), EqualToAll, {1: object()}, iter([]), range(3), lambda: 3, [[print]]]
)
def test_what_is_not_plain_has_no_value(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)


FORGED = {
    "nothing": b"",
    "no JSON": b"3)",
    "not text": b"\xff\xfe",
    "object": b'{"3": 3}',
    "unknown kind": b'["any", 3]',
    "no kind": b"[]",
    "number as kind": b"[3, 3]",
    "kind of kinds": b'[["int"], "3"]',
    "int of list": b'["int", ["3"]]',
    "int of nothing": b'["int"]',
    "ratio of nothing": b'["ratio"]',
    "ratio of text": b'["ratio", "3", "1"]',
    "ratio of zero": b'["ratio", 3, 0]',
    "ratio of floats": b'["ratio", 3.0, 1.0]',
    "huge ratio": b'["ratio", ["int", "'
    + b"3" * 1_000_000
    + b'"], ["int", "'
    + b"1" * 999_999
    + b'"]]',
    "array as a number": b'["array", 3, 3]',
    "bytes of number": b'["bytes", 3]',
    "complex of text": b'["complex", "3", 0]',
    "set of lists": b'["set", ["list", 3]]',
    "odd dict": b'["dict", 3]',
    "deep": b"[" * 100_000,
    "deep and closed": b'["list", ' * 50_000 + b"]" * 50_000,
    "long number": b"3" * 100_000,
    "colliding keys": b'["set", ["set", '
    + b", ".join(b"%d" % (n * (2**61 - 1)) for n in range(40_000))
    + b"]]",
    "colliding set": b'["set", '
    + b", ".join(b"%d" % (n * (2**61 - 1)) for n in range(40_000))
    + b"]",
}
EXPECTED = [3, 3.0, "3", [3], (3,), {3}, {3: 3}, b"3", 3j, None, {(3,)}]


@pytest.mark.parametrize("reply", FORGED.values(), ids=FORGED)
def test_forged_replies_equal_nothing_and_cost_little(reply: bytes) -> None:
    began = time.process_time()
    assert not any(matches(expected, reply) for expected in EXPECTED)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("text", ["", "inf", "x", "1 +", "f()", "__import__('os')", "(" * 9999])
def test_an_expected_value_must_be_a_literal(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a Python literal: "):
        read_expected(text)


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("1\n2", b"1\n2\n", True),
        ("1\n2\n", b"1 \n2\t\n\n\n", True),
        ("1\n2", b"1\r\n2\r\n", True),
        ("", b"\n", True),
        ("1", b" 1", False),
        ("1 2", b"1  2", False),
        ("1\n2", b"1\n\n2", False),
        ("1", b"1\n2", False),
        ("1", b"", False),
        ("é", "é".encode(), True),
        ("1", b"1\xff", False),
        ("1.0", b"1.00", False),
    ],
)
def test_outputs_compare_but_for_blanks_at_the_ends(
    expected: str, output: bytes, same: bool
) -> None:
    assert same_output(expected, output) == same
