"""Environments: what a rollout interacts with over turns."""

from covey.environments.environment import Environment
from covey.environments.single_turn import SingleTurn

__all__ = ["Environment", "SingleTurn"]
