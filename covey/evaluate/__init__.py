"""Measuring policies on held-out prompts, with intervals.

`covey.evaluate.evaluate` asks a policy; what is here needs no torch, and reports use it without.
"""

from covey.evaluate.intervals import Difference, Estimate
from covey.evaluate.items import (
    Comparison,
    Item,
    by_category,
    check_category,
    compare,
    estimates,
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
]
