"""Compares two formulas by computer algebra if numeric evaluation cannot compare them.

The library math-verify compares formulas with sympy, which evaluates text and may never finish. For
safety, Covey runs math-verify in the sandbox with a time limit, and never passes it formulas that
would take too long.
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache

from covey.errors import ConfigError
from covey.rewards.text import nesting
from covey.sandbox import require_isolation
from covey.sandbox.scorer import sandboxed

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
