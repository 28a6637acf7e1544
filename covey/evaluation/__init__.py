"""Evaluation of policies on held-out prompts, with confidence intervals.

The module `covey.evaluation.evaluate` generates completions and needs torch. The classes and
functions that this package exports do not need torch, so that reports can import them.
"""

from covey.evaluation.intervals import Difference, Estimate
from covey.evaluation.items import (
    Comparison,
    Item,
    by_category,
    check_category,
    compare,
    estimates,
    is_graded,
)

__all__ = [
    "Comparison",
    "Difference",
    "Estimate",
    "Item",
    "by_category",
    "check_category",
    "compare",
    "estimates",
    "is_graded",
]
