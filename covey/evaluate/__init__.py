"""Measuring policies on held-out prompts, with intervals."""

from covey.evaluate.evaluate import Evaluation, evaluate
from covey.evaluate.statistics import Estimate

__all__ = ["Estimate", "Evaluation", "evaluate"]
