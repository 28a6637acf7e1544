"""The mathematics: pure functions of tensors and floats."""

from covey.objective.algorithms import ALGORITHMS
from covey.objective.loss import LossOutput, Objective, policy_loss, with_advantage, with_weight

__all__ = [
    "ALGORITHMS",
    "LossOutput",
    "Objective",
    "policy_loss",
    "with_advantage",
    "with_weight",
]
