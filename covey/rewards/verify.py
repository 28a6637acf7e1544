"""Comparing two formulas with math-verify, as it runs in the sandbox."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from typing import Any


@cache
def _math_verify() -> Any:
    import math_verify

    # It warns that we switched off its time limit, which uses signals; ours ends the process.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify


def load() -> None:
    """Import what is slow to import, and have sympy fill its caches."""
    for expected, given in (("x > 2", r"(2, \infty)"), (r"\{1, x^2\}", r"\{x^2, 1\}")):
        score(expected, given)


def prepare(expected: str) -> str:
    """Return the target as it is: parsing it may take long, and only children have a time limit."""
    return expected


def score(expected: str, given: str) -> float:
    """Return 1 where two formulas in LaTeX are the same, otherwise 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target, answer = _parsed(expected), _parsed(given)
        if not target or not answer:
            return 0.0
        if _differ_by_nothing(target[0], answer[0]):
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


def _differ_by_nothing(target: Any, answer: Any) -> bool:
    """Whether multiplying out is enough to see it: ten times as fast as what math-verify does."""
    try:
        return bool((target - answer).expand() == 0)
    except Exception:  # sets, relations and matrices cannot be subtracted, each in its own way
        return False
