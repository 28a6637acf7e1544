r"""Compares two formulas by their values at three points, 100 times faster than algebra.

Two formulas count as equal if their values agree at all three points, one of which is negative. Two
formulas count as different if their values differ at all three points. The comparison is undecided
if the values agree at only some of the points, or if a value cannot be computed. The comparison is
undecided for inequalities, matrices and other formulas that this module cannot parse.
"""

from __future__ import annotations

import cmath
import importlib.util
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from covey.errors import ConfigError
from covey.rewards.text import nesting
from covey.sandbox import require_isolation
from covey.sandbox.scorer import sandboxed

SAME, DIFFERENT, ROUNDED = 1e-12, 1e-6, 1e-3
"""Limits on the relative difference of two values. Two values are equal if they differ by at most
SAME, and different if they differ by more than DIFFERENT. For formulas with decimals, ROUNDED takes
the place of DIFFERENT, because decimals may be rounded."""
POINTS = 3
LOST = 1e-6
"""Minimum ratio of the smaller to the larger number in a float addition. Float addition would lose
a much smaller summand, such as 2^{-100} in 1 - 2^{-100}."""
MAX_DIGITS = 12
"""Maximum number of digits of a number. Different numbers with more than MAX_DIGITS digits could
become the same float."""

Values = list[complex]
"""The values of an expression at the three points of evaluation."""

_TOKEN = re.compile(
    r"\s+|\\[,;:! ]|\\(?:left|right|displaystyle)(?![A-Za-z])"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\[A-Za-z]+)|(?P<other>.)"
)
_FUNCTIONS: Mapping[str, Callable[[complex], complex]] = MappingProxyType(
    {r"\sin": cmath.sin, r"\cos": cmath.cos, r"\tan": cmath.tan, r"\ln": cmath.log,
     r"\exp": cmath.exp}
)  # fmt: skip
_CONSTANTS = MappingProxyType({r"\pi": math.pi, "π": math.pi, "e": math.e, "i": 1j})
_DIGITS = tuple("0123456789.")
_TIMES = (r"\cdot", r"\times", "*")
_DIVIDED = ("/", r"\div")
_FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac")


class _UnsupportedError(ValueError):
    """Raised if a formula has syntax or values that this module does not handle."""


def same_numerically(answer: str, target: str) -> bool | None:
    r"""Return whether two formulas are equal, or None if the comparison is undecided.

    Intervals and points are compared component by component. The elements of sets may be in any
    order. Two equations are equal if one is a multiple of the other. If exactly one formula is an
    equation, such as `y = 2x`, the right side of this equation is compared with the other formula.

    >>> same_numerically("(x+1)^2", "x^2 + 2x + 1"), same_numerically("x<2", "2")
    (True, None)
    >>> same_numerically(r"(0.5, \sqrt{8})", r"(\frac12, 2\sqrt{2})")
    True
    """
    one, other = _components(answer), _components(target)
    if one is not None and other is not None and len(one) == len(other):
        if (one[0], one[-1]) != (other[0], other[-1]):
            return None
        if one[0] == r"\{":
            return _same_set(one[1:-1], other[1:-1])
        equal = [same_numerically(a, b) for a, b in zip(one[1:-1], other[1:-1], strict=True)]
        return None if None in equal else all(equal)
    try:
        return _same_equation(answer.split("="), target.split("="))
    except (_UnsupportedError, ArithmeticError, ValueError, RecursionError):
        return None


def _same_set(answer: list[str], target: list[str]) -> bool | None:
    """Return whether two sets have equal elements, or None if the comparison is undecided."""
    left = list(answer)
    for wanted in target:
        equal = [same_numerically(element, wanted) for element in left]
        if True not in equal:
            return None if None in equal else False
        del left[equal.index(True)]
    return True


def _same_equation(answer: list[str], target: list[str]) -> bool | None:
    if len(answer) == len(target) == 1:
        return _compare(_Evaluator(answer[0]), _Evaluator(target[0]))
    if len(answer) > 2 or len(target) > 2:
        return None
    if len(answer) != len(target):
        left, right = answer if len(answer) == 2 else target
        # In an equation such as `y = 2x`, the right side is the value of the letter.
        if not re.fullmatch("[A-Za-z]", left.strip()) or left.strip() in right:
            return None
        return same_numerically(answer[-1], target[-1])
    sides = [_Evaluator(f"({left})-({right})") for left, right in (answer, target)]
    # Both sides of an identity such as x = x cancel to 0, which has no ratio.
    if sides[0].variables != sides[1].variables or 0 in (*sides[0].values, *sides[1].values):
        return None
    ratios = [a / b for a, b in zip(sides[0].values, sides[1].values, strict=True)]
    spread = max(abs(ratio - ratios[0]) for ratio in ratios) / max(1e-300, *map(abs, ratios))
    if spread <= SAME:
        return True
    decimals = sides[0].decimals or sides[1].decimals
    return False if spread > (ROUNDED if decimals else DIFFERENT) else None


def _components(formula: str) -> list[str] | None:
    r"""Split `(a, b]` or `\{a, b\}` into the opening bracket, the components and the closing
    bracket."""
    text = formula.replace(r"\left", "").replace(r"\right", "").strip()
    braces = text.startswith(r"\{") and text.endswith(r"\}")
    if braces:
        text = f"({text[2:-2]})"
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth, cuts = 0, [0]
    for at, sign in enumerate(text):
        depth += 1 if sign in "([{" else -1 if sign in ")]}" else 0
        if depth == 0 and at < len(text) - 1:
            return None  # the last bracket does not close the first
        if sign == "," and depth == 1:
            cuts.append(at)
    if len(cuts) == 1:
        return None
    parts = [text[start + 1 : end] for start, end in pairwise([*cuts, len(text) - 1])]
    return [r"\{", *parts, r"\}"] if braces else [text[0], *parts, text[-1]]


def _compare(answer: _Evaluator, target: _Evaluator) -> bool | None:
    apart = [
        abs(a - b) / max(1e-300, abs(a), abs(b)) if a != b else 0.0
        for a, b in zip(answer.values, target.values, strict=True)
    ]
    if not all(map(math.isfinite, apart)):
        return None
    if max(apart) <= SAME:
        return True
    if answer.variables != target.variables:
        return None  # a letter may be a unit
    certain = ROUNDED if answer.decimals or target.decimals else DIFFERENT
    return False if min(apart) > certain else None


def _points(variable: str) -> Values:
    """Return three values of a variable, two above 0 and one below 0."""
    share = zlib.crc32(variable.encode()) / 2**32
    return [complex(0.61 + 1.7 * share), complex(2.53 - 1.3 * share), complex(-1.87 + 1.1 * share)]


def _added(a: complex, b: complex) -> complex:
    """Return `a + b`, or raise an error if float rounding would lose a summand or too many
    digits."""
    total = a + b
    least, _, most = sorted((abs(a), abs(b), abs(total)))
    if 0 < least < LOST * most:
        raise _UnsupportedError("sum")
    return total


def _raised(base: complex, exponent: complex) -> complex:
    power = base**exponent
    if power == 0 != base:
        raise _UnsupportedError("^")  # underflow
    return power


class _Evaluator:
    """A recursive-descent parser that evaluates a formula at three points while it parses."""

    def __init__(self, formula: str) -> None:
        self.tokens = [m[0] for m in _TOKEN.finditer(formula) if m.lastgroup is not None] + [""]
        self.at = 0
        self.variables: set[str] = set()
        self.decimals = any("." in token for token in self.tokens)
        self.values = self.sum()
        if self.next != "":
            raise _UnsupportedError(self.next)

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, *wanted: str) -> bool:
        found = self.next in wanted
        self.at += found
        return found

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise _UnsupportedError(self.next)

    def sign(self) -> int:
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self.take("-") else sign
            self.take("+")
        return sign

    def sum(self) -> Values:
        total = self.product()
        while self.next in ("+", "-"):
            total = [_added(a, b) for a, b in zip(total, self.product(), strict=True)]
        return total

    def product(self) -> Values:
        sign = self.sign()
        total = [sign * a for a in self.power()]
        while True:
            if self.take(*_DIVIDED):
                total = [a / b for a, b in zip(total, self.power(), strict=True)]
                if self.implicit_factor():
                    raise _UnsupportedError("1/2x")  # ambiguous: x/2 or 1/(2x)
            elif self.take(*_TIMES) or self.implicit_factor():
                total = [a * b for a, b in zip(total, self.power(), strict=True)]
            else:
                return total

    def implicit_factor(self) -> bool:
        """Whether the next token is a factor of an implicit product, such as `x` in `2x`."""
        command = self.next[:1] == "\\" and self.next not in (*_TIMES, *_DIVIDED)
        return self.next in ("(", "{") or self.next[:1].isalpha() or command

    def power(self) -> Values:
        base = self.atom()
        if not self.take("^"):
            return base
        sign = -1 if self.take("-") else 1
        exponent = self.atom()
        if self.next == "^":
            raise _UnsupportedError("^")
        return [_raised(a, sign * b) for a, b in zip(base, exponent, strict=True)]

    def atom(self) -> Values:
        token = self.next
        self.at += token != ""
        if token[:1] in _DIGITS:
            if self.next[:1] in _DIGITS or len(token) > MAX_DIGITS:
                raise _UnsupportedError(self.next)
            return [complex(float(token))] * POINTS
        if token in ("(", "{"):
            inner = self.sum()
            self.need(")" if token == "(" else "}")
            return inner
        if token in _CONSTANTS:
            return [complex(_CONSTANTS[token])] * POINTS
        if token in _FRACTIONS:
            return [a / b for a, b in zip(self.argument(), self.argument(), strict=True)]
        if token == r"\sqrt":
            return [cmath.sqrt(a) for a in self.argument()]
        if token in _FUNCTIONS:
            return self.function(_FUNCTIONS[token])
        if len(token) == 1 and token.isascii() and token.isalpha():
            self.variables.add(token)
            return _points(token)
        raise _UnsupportedError(token)

    def function(self, function: Callable[[complex], complex]) -> Values:
        bracketed = self.next in ("(", "{")
        if self.next[:1] in _DIGITS:
            raise _UnsupportedError(self.next)
        values = [function(a) for a in self.argument()]
        if not bracketed and (self.next == "^" or self.implicit_factor()):
            raise _UnsupportedError("sin x^2")  # ambiguous: sin(x^2) or (sin x)^2
        return values

    def argument(self) -> Values:
        """Parse the argument of a LaTeX command: a bracketed formula, a letter or one digit.

        For example, `\\frac12` has the arguments 1 and 2.
        """
        token = self.next
        if token[:1] in _DIGITS[:10] and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
            self.at += 1
            return [complex(float(token[0]))] * POINTS
        if token in ("(", "{", r"\pi") or (len(token) == 1 and token.isascii() and token.isalnum()):
            return self.atom()
        raise _UnsupportedError(token)


# Compares two formulas by computer algebra if numeric evaluation cannot compare them.


MAX_FORMULA = 300
MAX_BRACKETS = 7
MAX_TERMS = 100
MAX_NUMBER = 5000
"""Maximum number of digits of a power such as 3^1000. Sympy factors numbers under a root, which can
take very long for a large power."""
MAX_DEGREE = 100
"""Maximum degree of a polynomial in a division, which takes time quadratic in the degree."""

_DIVISION = re.compile(r"frac|/|\\div")
_UNBOUNDED = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|Gamma|zeta|operatorname|frac\{d)"
    r"|exp *(?:\\left)? *[({][^)}]*exp|[0-9]{31}"
    r"|![^=]*!|[^0-9a-zA-Z ] *!|[0-9]{3,} *!|(?:binom|choose).*[0-9]{4}|[0-9]{4}.*choose"
    r"|binom *\{[^{}]*[a-zA-Z][^{}]*\} *\{[^{}]*[0-9]{3}",
    re.DOTALL,
)


def require_math_verify(unsafe: bool) -> None:
    """Raise ConfigError if math-verify is missing, or if the required sandbox is unavailable."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "reward: comparing formulas needs the package math-verify; run "
            "pip install 'covey[tasks]', or set symbolic = false"
        )
    if unsafe:
        return
    try:
        require_isolation()
    except ConfigError as no_sandbox:
        raise ConfigError(
            f"{no_sandbox}; or compare formulas without algebra, with symbolic = false"
        ) from None


@lru_cache(maxsize=1 << 14)
def same_symbolically(answer: str, target: str, unsafe: bool = False) -> bool:
    """Return whether math-verify finds that two formulas are equal, and False after a timeout."""
    scorer = sandboxed("covey.rewards.math.math_verify_scorer", unsafe=unsafe)
    return scorer.score(target, answer) == 1.0


def _exponent(formula: str, at: int) -> str:
    """Return the exponent that starts at index `at`, after a `^`.

    The returned text ends with `^` if another power or a factorial follows the exponent.
    """
    match = re.compile(r" *[-+]? *").match(formula, at)
    start = end = match.end() if match else at
    depth = 0
    while end < len(formula):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(formula[end], 0)
        end += 1
        if depth <= 0 and not re.match(r"[0-9A-Za-z]", formula[end : end + 1]):
            break
    tower = formula[end:].lstrip().startswith(("^", "!"))
    return formula[start:end] + ("^" if tower else "")


def _bracketed_before(formula: str, at: int) -> str:
    """Return the bracketed text that ends before index `at`, or "" if no bracket ends there."""
    end = len(formula[:at].rstrip())
    depth = 0
    for start in range(end - 1, -1, -1):
        depth += {"}": 1, ")": 1, "{": -1, "(": -1}.get(formula[start], 0)
        if depth <= 0:
            return formula[start:end] if start < end - 1 else ""
    return ""


def _powers_are_small(formula: str) -> bool:
    nested, largest = 1, 1
    for match in re.finditer(r"\^", formula):
        exponent = _exponent(formula, match.end())
        # e and i are constants, and names of LaTeX commands are not variables.
        variable = re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\[A-Za-z]+", "", exponent))
        digits = "".join(re.findall("[0-9]+", exponent))
        if len(digits) > 4 or (not variable and re.search(r"[\^!]", exponent)):
            return False
        base, power = _bracketed_before(formula, match.start()), max(1, int(digits or 1))
        before = formula[: match.start()].rstrip()
        letter, number = before[-1:].isalpha(), len(before) - len(before.rstrip("0123456789"))
        if number * power > MAX_NUMBER:
            return False
        if letter and power > MAX_DEGREE and _DIVISION.search(formula):
            return False
        if base:
            nested *= power
            # When expanded, the power of a sum has about this many terms.
            if nested ** min(len(re.findall("[-+]", base)), 9) > MAX_TERMS:
                return False
        else:
            largest = max(largest, power)
    return nested <= 1000 and nested * largest <= 1_000_000


def is_tractable(formula: str) -> bool:
    r"""Whether a formula is small enough to compute, according to a cheap check of its text.

    A short text can describe a number that fills the memory, such as `10^{10^{10}}` or `9999999!`.

    >>> is_tractable(r"\frac{x^{10}}{2^{100}}"), is_tractable("10^{10^{10}}")
    (True, False)
    """
    formula = formula.replace("**", "^").replace(r"\!", "")
    if len(formula) > MAX_FORMULA or _UNBOUNDED.search(formula) or nesting(formula) > MAX_BRACKETS:
        return False
    return _powers_are_small(formula)
