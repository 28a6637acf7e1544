"""Compares formulas with math-verify, inside the sandbox."""

from __future__ import annotations

import importlib
import logging
import warnings
from functools import cache, lru_cache
from typing import Any

COMMON = (
    r"x > 2",
    r"(2, \infty)",
    r"[-1, 3) \cup (4, 5]",
    r"\{1, x^2\}",
    r"\frac{x+1}{2\sqrt{3}}",
    r"y = 2x - \frac12",
    r"-3 \le x < 4",
    r"\begin{pmatrix} 1 & -2 \\ 3 & 4 \end{pmatrix}",
    r"\sin^2(x) + \cos 2x",
    r"\log_2 8 + \ln x",
    r"e^{-x^2} + 5!",
    r"\binom{n}{2}",
    r"x = 1, y = 2",
    r"\pm\sqrt{2}i",
    r"\text{none}",
    r"|x-1| + \pi",
    r"a_1 b^{n+1}",
    r"(x-1)(x+2)",
    r"50\%",
    r"x \neq 3",
    r"30^\circ",
)


@cache
def _math_verify() -> Any:
    module = importlib.import_module("math_verify")
    # Both packages warn that their time limits are off, but the sandbox has its own limit.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return module


def load() -> None:
    """Import math-verify, and fill the caches of its parser and of sympy with common formulas.

    Child processes inherit the filled caches.
    """
    for formula in COMMON:
        score(prepare(formula), formula)
    score(prepare("x > 2"), r"(2, \infty)")


@lru_cache(maxsize=1024)
def prepare(target: str) -> Any:
    """Parse the target once for all completions of a prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _parsed(target)


def score(target: Any, text: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = _parsed(text)
        if not target or not answer:
            return 0.0
        if _same_expanded(target[0], answer[0]):
            return 1.0
        return float(bool(_math_verify().verify(target, answer, timeout_seconds=None)))


def _parsed(formula: str) -> Any:
    module = _math_verify()
    return module.parse(
        f"${formula}$",
        extraction_config=(module.LatexExtractionConfig(),),
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _same_expanded(target: Any, answer: Any) -> bool:
    """Return whether the difference of two formulas expands to 0, without math-verify."""
    try:
        return bool((target - answer).expand() == 0)
    except Exception:  # sets, relations and matrices raise different errors when subtracted
        return False
