"""Exact evaluation of arithmetic expressions that a model wrote, without `eval`.

Python parses the expression, and only numbers and arithmetic are evaluated. Every limit is checked
before anything is computed, because `95**87**64` would never finish.
"""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction

MAX_CHARACTERS = 1000
MAX_DIGITS = 100
MAX_NESTING = 50
MAX_NUMBERS = 200
MAX_BITS = 4096
"""Maximum size, in bits, of the numerator and the denominator of an intermediate result."""

# Unicode signs for multiplication (cross, two dots), division and minus (minus sign, dash).
_TWINS = str.maketrans("\u00d7\u22c5\u00b7\u00f7\u2212\u2013", "***/--")
_CHARACTERS = re.compile(r"[-+*/^().0-9\s]*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+", re.ASCII)
# Python rejects numbers with a leading zero.
_LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])", re.ASCII)


class ExpressionError(ValueError):
    """Raised if the text is not arithmetic, or exceeds a limit."""


def evaluate(text: str, powers: bool = False) -> Fraction:
    """Return the exact value of an expression of numbers, `+ - * /` and parentheses.

    With `powers`, the operators `**` and `^` for powers are allowed. Operators have the same
    precedence as in Python, so `-2**2` is -4, and `2**3**2` is 512.

    >>> evaluate("(3 + 4) * 2 / 4"), evaluate("3.14159 * 5**2", powers=True)
    (Fraction(7, 2), Fraction(314159, 4000))
    """
    text = _LEADING_ZEROS.sub("", _plain(text)).replace("^", "**")
    if not powers and "**" in text:
        raise ExpressionError("powers are not allowed here")
    try:
        return _value(ast.parse(text, mode="eval").body, text, 0)
    except (SyntaxError, MemoryError, RecursionError):
        raise ExpressionError("not an arithmetic expression") from None


_LATEX_SIGNS = re.compile(r"\\(?:left|right|,|;|!|:| )|\\(?P<times>cdot|times)(?![A-Za-z])|\\div")
_LATEX_PAIR = re.compile(r"\\([dtc]?frac|[dt]?binom) *\{([^{}]*)\} *\{([^{}]*)\}")
_FACTORIAL = re.compile(r"(?<![0-9.)}])([0-9]{1,2})!(?![!0-9])")
_LATEX_POWER = re.compile(r"\^ *\{([^{}]*)\}")
_IMPLICIT_PRODUCT = re.compile(r"[0-9.)] *\(|\) *[0-9.]")
MAX_FACTORIAL = 69
"""The largest n whose factorial, and so every `\\binom{n}{k}`, has at most MAX_DIGITS digits."""


def latex_value(formula: str) -> Fraction | None:
    r"""Return the exact value of LaTeX arithmetic of whole and decimal numbers, or None.

    >>> latex_value(r"\frac{2^{10}}{4} - 3!"), latex_value(r"\sqrt{4}"), latex_value("2(3)")
    (Fraction(250, 1), None, None)
    """
    if len(formula) > MAX_CHARACTERS:
        return None

    def pair(match: re.Match[str]) -> str:
        if match[1].endswith("frac"):
            return f"(({match[2]})/({match[3]}))"
        n, k = match[2].strip(), match[3].strip()
        if not (n.isdecimal() and k.isdecimal() and int(n[:4]) <= 300 and len(n + k) <= 6):
            return "?"
        return str(math.comb(int(n), int(k)))

    text = _LATEX_SIGNS.sub(
        lambda m: "*" if m["times"] else "/" if m[0] == r"\div" else " ", formula
    )
    for _ in range(MAX_NESTING):
        text, powers = _LATEX_POWER.subn(r"^(\1)", text)
        text, pairs = _LATEX_PAIR.subn(pair, text)
        if not powers + pairs:
            break
    text = _FACTORIAL.sub(
        lambda m: str(math.factorial(int(m[1]))) if int(m[1]) <= MAX_FACTORIAL else "?", text
    )
    text = text.replace("{", "(").replace("}", ")")
    if _IMPLICIT_PRODUCT.search(text) or "?" in text:
        return None  # 2(3) and 1 1/2 are read in more than one way
    try:
        return evaluate(text, powers=True)
    except ExpressionError:
        return None


def numbers_in(text: str) -> list[int]:
    """Return the whole numbers of an expression in order, including repetitions.

    >>> numbers_in("(75 - 3) * 3")
    [75, 3, 3]
    """
    numbers = _NUMBER.findall(_plain(text))
    for number in numbers:
        if "." in number:
            raise ExpressionError(f"{number} is not a whole number")
    return [int(number) for number in numbers]


def _plain(text: str) -> str:
    """Return an expression as one line of ASCII, or raise an error if it exceeds a limit."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    text = text.rstrip().translate(_TWINS)
    if not _CHARACTERS.fullmatch(text):
        raise ExpressionError("a character that is not part of an arithmetic expression")
    numbers = _NUMBER.findall(text)
    if len(numbers) > MAX_NUMBERS:
        raise ExpressionError(f"more than {MAX_NUMBERS} numbers")
    if any(len(number) - number.count(".") > MAX_DIGITS for number in numbers):
        raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
    depth = 0
    for bracket in re.findall("[()]", text):
        depth += 1 if bracket == "(" else -1
        if depth > MAX_NESTING:
            raise ExpressionError(f"nested deeper than {MAX_NESTING}")
    return " ".join(text.split())


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    """Evaluate a node. `depth` counts nested powers, as in `2**3**2`."""
    if depth > MAX_NESTING:
        raise ExpressionError(f"nested deeper than {MAX_NESTING}")
    sign = 1
    while isinstance(node, ast.UnaryOp):
        sign = -sign if isinstance(node.op, ast.USub) else sign
        node = node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        # From the source text, because a float would round 0.1.
        return sign * Fraction(text[node.col_offset : node.end_col_offset])
    if not isinstance(node, ast.BinOp):
        raise ExpressionError("not an arithmetic expression")
    power = isinstance(node.op, ast.Pow)
    left, right = _value(node.left, text, depth), _value(node.right, text, depth + power)
    return sign * _combined(node.op, left, right)


def _combined(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Pow):
        return _power(left, right)
    if isinstance(operator, ast.Add | ast.Sub):
        value = left + right if isinstance(operator, ast.Add) else left - right
    elif isinstance(operator, ast.Mult):
        value = left * right
    elif isinstance(operator, ast.Div) and right != 0:
        value = left / right
    else:
        raise ExpressionError("division by zero, or an operator other than + - * /")
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
