"""How answers are judged. No torch here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.rewards.score import Reward, Score
from covey.rewards.think_answer import ThinkAnswer

REWARDS: Mapping[str, Callable[..., Reward]] = MappingProxyType({"think_answer": ThinkAnswer})

__all__ = ["REWARDS", "Reward", "Score", "ThinkAnswer"]
