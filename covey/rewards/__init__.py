"""Reward functions, which score completions. This package does not import torch.

The registry `covey.rewards.registry.REWARDS` names all rewards. This file does not import the
registry, so that a scoring process starts fast.
"""

from covey.rewards.length import LENGTH_PENALTIES, LengthPenalty
from covey.rewards.score import Reward, Score
from covey.rewards.think_answer import ThinkAnswer
from covey.rewards.user import as_reward

__all__ = ["LENGTH_PENALTIES", "LengthPenalty", "Reward", "Score", "ThinkAnswer", "as_reward"]
