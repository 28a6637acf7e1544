"""Compares a sandboxed program's results with expected values, outside the sandbox.

A program's result is untrusted JSON. The comparison never creates an object of a class that the
program defines. The comparison is fast even for a huge result, because it visits no more items than
the expected value has.
"""

from __future__ import annotations

import ast
import cmath
import json
import math
from fractions import Fraction
from typing import Any

RELATIVE, AROUND_ZERO = 1e-6, 1e-12
"""The relative tolerance for expected floats, and the absolute tolerance if 0.0 is expected. If the
absolute tolerance applied to all values, a result of 0 would be accepted for any tiny expected
value."""
_MOST_BITS = 4096
"""Maximum bits of a numerator or denominator, because reducing a fraction takes quadratic time."""
_MOST_IN_A_KEY = 1000
"""Maximum items of a set, because building a set takes quadratic time if hashes collide."""


def read_expected(text: str) -> object:
    """Parse a Python literal, which is trusted because it comes from the dataset.

    Raises ValueError if the text is not a literal.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"not a Python literal: {text[:80]!r}") from None


def matches(expected: object, reply: bytes) -> bool:
    """Return whether the return value of a program's function equals the expected value.

    `reply` is the JSON text with the return value that the sandboxed process sent.

    Values of different types are not equal, as in Python: a list does not equal a tuple. A number
    equals an expected float if the relative difference is at most 1e-6. If 0.0 is expected, the
    absolute difference must be at most 1e-12. A numpy array equals a list or tuple with the same
    items. A Fraction or Decimal equals a plain number of the same value.

    >>> matches((1, [2.5]), b'["tuple", 1, ["list", 2.5000001]]'), matches([1], b'["tuple", 1]')
    (True, False)
    """
    try:
        return _same(expected, json.loads(reply))
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError):
        return False


def same_output(expected: str, output: bytes) -> bool:
    """Return whether two texts are equal, ignoring whitespace at line ends and at the end.

    >>> same_output("1 2\\n3\\n", b"1 2 \\n3")
    True
    """
    return _lines(expected) == _lines(output.decode(errors="replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same(expected: object, reply: Any) -> bool:
    if isinstance(expected, list | tuple):
        kinds = ("list" if isinstance(expected, list) else "tuple", "array")
        if not any(_is_kind(reply, kind, len(expected)) for kind in kinds):
            return False
        return all(map(_same, expected, reply[1:]))
    if isinstance(expected, dict):
        return _is_kind(reply, "dict", 2 * len(expected)) and _same_dict(expected, reply)
    if isinstance(expected, set):
        return _is_kind(reply, "set", len(expected)) and set(map(_key, reply[1:])) == expected
    return _same_scalar(expected, _scalar(reply))


def _is_kind(reply: Any, kind: str, size: int) -> bool:
    return isinstance(reply, list) and len(reply) == size + 1 and reply[0] == kind


def _same_dict(expected: dict[Any, Any], reply: list[Any]) -> bool:
    given = dict(zip(map(_key, reply[1::2]), reply[2::2], strict=True))
    return given.keys() == expected.keys() and all(
        _same(value, given[key]) for key, value in expected.items()
    )


def _key(reply: Any) -> Any:
    """Decode a dict key or a set item from JSON into a hashable Python value.

    Raises ValueError for a value that cannot be hashed.
    """
    if isinstance(reply, list) and reply[:1] == ["tuple"]:
        return tuple(map(_key, reply[1:]))
    if isinstance(reply, list) and reply[:1] == ["set"]:
        if len(reply) > _MOST_IN_A_KEY:
            raise ValueError("a set too large to be a key")
        return frozenset(map(_key, reply[1:]))
    return _scalar(reply)


def _scalar(reply: Any) -> Any:
    """Decode a number, text or other scalar. Raises ValueError for a container."""
    if not isinstance(reply, list | dict):
        return reply
    kind, *parts = reply
    if kind == "int":
        return int(parts[0], 16)
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind == "complex":
        return complex(*parts)
    if kind == "ratio":
        top, bottom = map(_bounded_int, parts)
        return Fraction(top, bottom)
    raise ValueError(kind)


def _bounded_int(reply: Any) -> int:
    number = _scalar(reply)
    if not isinstance(number, int) or number.bit_length() > _MOST_BITS:
        raise ValueError("not an integer, or too large")
    return number


def _same_scalar(expected: object, given: object) -> bool:
    if isinstance(given, Fraction) and isinstance(expected, float | complex):
        given = float(given)
    near = 0.0 if expected else AROUND_ZERO
    if isinstance(expected, float) and isinstance(given, int | float):
        return math.isclose(expected, given, rel_tol=RELATIVE, abs_tol=near)
    if isinstance(expected, complex) and isinstance(given, int | float | complex):
        return cmath.isclose(expected, given, rel_tol=RELATIVE, abs_tol=near)
    return expected == given
