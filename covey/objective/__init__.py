"""Advantages, ratios, surrogates and losses: pure functions of tensors and floats."""

from covey.objective.algorithms import ALGORITHMS
from covey.objective.build import algorithm, build
from covey.objective.compose import takes
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
    "algorithm",
    "build",
    "next_beta",
    "policy_loss",
    "takes",
    "value_loss",
    "with_advantage",
    "with_marks",
    "with_weight",
]
