"""How answers are judged. No torch here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.rewards.length import LENGTH_PENALTIES, LengthPenalty
from covey.rewards.score import Reward, Score
from covey.rewards.think_answer import ThinkAnswer

REWARDS: Mapping[str, Callable[..., Reward]] = MappingProxyType({"think_answer": ThinkAnswer})

__all__ = ["LENGTH_PENALTIES", "REWARDS", "LengthPenalty", "Reward", "Score", "ThinkAnswer"]
