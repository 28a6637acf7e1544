"""Measuring policies on held-out prompts, with intervals."""

from covey.evaluate.evaluate import Evaluation, evaluate
from covey.evaluate.items import (
    Comparison,
    Item,
    by_category,
    check_category,
    compare,
    estimates,
)
from covey.evaluate.statistics import Difference, Estimate

__all__ = [
    "Comparison",
    "Difference",
    "Estimate",
    "Evaluation",
    "Item",
    "by_category",
    "check_category",
    "compare",
    "estimates",
    "evaluate",
]
