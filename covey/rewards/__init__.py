"""Reward functions, which score completions. No torch here.

The registry of rewards is `covey.rewards.registry.REWARDS`. It is not imported here, so that a
scoring process starts fast.
"""

from covey.rewards.length import LENGTH_PENALTIES, LengthPenalty
from covey.rewards.score import Reward, Score
from covey.rewards.think_answer import ThinkAnswer
from covey.rewards.user import as_reward

__all__ = ["LENGTH_PENALTIES", "LengthPenalty", "Reward", "Score", "ThinkAnswer", "as_reward"]
