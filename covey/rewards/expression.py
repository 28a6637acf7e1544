"""Arithmetic that a model wrote, computed exactly and without `eval`.

`95**87**64` would keep `eval` busy for ever, so every limit is checked before anything is computed.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 1000
MAX_DIGITS = 30
MAX_NESTING = 50
MAX_NUMBERS = 200
MAX_BITS = 4096
"""Of the numerator and of the denominator of every result on the way."""

# The signs for times (cross, two dots), division, minus and the dash that stands for it.
_TWINS = str.maketrans("\u00d7\u22c5\u00b7\u00f7\u2212\u2013", "***/--")
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|\*\*|[-+*/^()])", re.ASCII)


class ExpressionError(ValueError):
    """The text is no arithmetic, or more of it than the limits allow."""


def evaluate(text: str, operators: str = "+-*/") -> Fraction:
    """Return the exact value of an expression of numbers, operators and parentheses.

    `operators` lists those that may stand in it; with `**` among them `^` means the same. They bind
    as in Python: `-2**2` is -4, and `2**3**2` is 512.

    >>> evaluate("(3 + 4) * 2 / 4"), evaluate("3.14159 * 5**2", "+-*/**")
    (Fraction(7, 2), Fraction(314159, 4000))
    """
    parser = _Parser(_tokens(text), operators)
    value = parser.sum(0)
    if parser.next is not None:
        raise ExpressionError(f"{parser.next!r} is one too many")
    return value


def numbers_in(text: str) -> list[int]:
    """Return the whole numbers of an expression, in order, each as often as it stands there.

    >>> numbers_in("(75 - 3) * 3")
    [75, 3, 3]
    """
    numbers = [token for token in _tokens(text) if _is_number(token)]
    for number in numbers:
        if "." in number:
            raise ExpressionError(f"{number} is not a whole number")
    return [int(number) for number in numbers]


def _is_number(token: str) -> bool:
    return token[0] == "." or token[0].isdigit()


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    text = text.translate(_TWINS).rstrip()
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text[at]!r} is no part of an expression")
        tokens.append(match[1])
        at = match.end()
    numbers = [token for token in tokens if _is_number(token)]
    if len(numbers) > MAX_NUMBERS:
        raise ExpressionError(f"more than {MAX_NUMBERS} numbers")
    if any(len(number) - number.count(".") > MAX_DIGITS for number in numbers):
        raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
    return tokens


class _Parser:
    """One function for each level of precedence. `depth` bounds Python's recursion."""

    def __init__(self, tokens: list[str], operators: str) -> None:
        self.tokens = tokens[::-1]
        self.powers = "**" in operators
        self.allowed = set(operators.replace("**", ""))

    @property
    def next(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def take(self, *choices: str) -> str | None:
        """Return and pass the next token if it is one of the operators given."""
        if self.next not in choices:
            return None
        token = self.tokens.pop()
        if token not in self.allowed:
            raise ExpressionError(f"{token!r} is not allowed here")
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while operator := self.take("+", "-"):
            other = self.product(depth)
            value = _bounded(value + other if operator == "+" else value - other)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while operator := self.take("*", "/"):
            other = self.signed(depth)
            if operator == "/" and other == 0:
                raise ExpressionError("division by zero")
            value = _bounded(value * other if operator == "*" else value / other)
        return value

    def signed(self, depth: int) -> Fraction:
        negative = False
        while sign := self.take("+", "-"):
            negative ^= sign == "-"
        value = self.power(depth)
        return -value if negative else value

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        if self.next not in ("**", "^"):
            return base
        if not self.powers:
            raise ExpressionError("powers are not allowed here")
        self.tokens.pop()
        # The exponent is parsed a level deeper: towers nest to the right.
        return _power(base, self.signed(_deeper(depth)))

    def atom(self, depth: int) -> Fraction:
        if not self.tokens:
            raise ExpressionError("the expression ends too early")
        token = self.tokens.pop()
        if _is_number(token):
            return Fraction(token)
        if token != "(":
            raise ExpressionError(f"{token!r} where a number should be")
        value = self.sum(_deeper(depth))
        if self.next != ")":
            raise ExpressionError("a parenthesis is not closed")
        self.tokens.pop()
        return value


def _deeper(depth: int) -> int:
    if depth >= MAX_NESTING:
        raise ExpressionError(f"nested deeper than {MAX_NESTING}")
    return depth + 1


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError(f"a result of more than {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError(f"the exponent {exponent} is not a whole number")
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MAX_BITS:
        raise ExpressionError(f"a power of more than {MAX_BITS} bits")
    return base**exponent.numerator
