"""Comparing what a program gave with what was expected, outside of the sandbox.

What comes out of the sandbox is untrusted JSON. It is compared with the expected value from the
expected side: nothing is built from it that is larger or deeper than what was expected, and no
object of the program's making takes part.
"""

from __future__ import annotations

import ast
import cmath
import json
import math
from fractions import Fraction
from typing import Any

RELATIVE, AROUND_ZERO = 1e-6, 1e-12
"""How far a number may be from an expected float: a share of it, and from 0 this much.

Around any other number an absolute distance would let 0 pass for every small one.
"""
_MOST_BITS = 4096
"""Of a numerator or denominator: to reduce a fraction takes the square of its size."""
_MOST_IN_A_KEY = 1000
"""Numbers can be made to collide, and then a set takes the square of its size to build."""


def read_expected(text: str) -> object:
    """Read a Python literal. It comes with the prompt, so it is trusted.

    Raises ValueError if it is none.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"not a Python literal: {text[:80]!r}") from None


def matches(expected: object, reply: bytes) -> bool:
    """Tell whether a call's value, as its process wrote it, equals the expected one.

    Equal as Python has it, lists not being tuples; but where a float is expected, any number within
    a relative 1e-6 will do, and where 0.0 is, any within 1e-12. An array of numpy equals the list
    or tuple of its items, and a Fraction or Decimal the number that it is.

    >>> matches((1, [2.5]), b'["tuple", 1, ["list", 2.5000001]]'), matches([1], b'["tuple", 1]')
    (True, False)
    """
    try:
        return _same(expected, json.loads(reply))
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError):
        return False


def same_output(expected: str, output: bytes) -> bool:
    """Tell whether texts are equal but for blanks at the ends of lines and at the end.

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
    """Return what can be a key or in a set. Raises ValueError for all else."""
    if isinstance(reply, list) and reply[:1] == ["tuple"]:
        return tuple(map(_key, reply[1:]))
    if isinstance(reply, list) and reply[:1] == ["set"]:
        if len(reply) > _MOST_IN_A_KEY:
            raise ValueError("a set too large to be a key")
        return frozenset(map(_key, reply[1:]))
    return _scalar(reply)


def _scalar(reply: Any) -> Any:
    """Return what has no parts. Raises ValueError for all else."""
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
        top, bottom = map(_whole, parts)
        return Fraction(top, bottom)
    raise ValueError(kind)


def _whole(reply: Any) -> int:
    number = _scalar(reply)
    if not isinstance(number, int) or number.bit_length() > _MOST_BITS:
        raise ValueError("no whole number, or too large a one")
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
