"""Advantages, ratios, surrogates and losses: pure functions of tensors and floats."""

from covey.objective.algorithms import ALGORITHMS
from covey.objective.build import build, find_algorithm
from covey.objective.loss import (
    Objective,
    PolicyLoss,
    next_beta,
    policy_loss,
    value_loss,
    with_advantage,
    with_marks,
    with_weight,
)

__all__ = [
    "ALGORITHMS",
    "Objective",
    "PolicyLoss",
    "build",
    "find_algorithm",
    "next_beta",
    "policy_loss",
    "value_loss",
    "with_advantage",
    "with_marks",
    "with_weight",
]
