"""Rewards with one fault each, for the lab to find."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import ClassVar

from covey.rewards import Score, ThinkAnswer
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """The default reward with a fault."""

    fault: str

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        score = ThinkAnswer()(prompt, text)
        if self.fault == "contains":
            right = prompt.target in text
            return Score(reward=float(right), success=right)
        if self.fault == "random":
            return Score(reward=score.reward * random.uniform(0.9, 1.0), success=score.success)
        if self.fault == "process":
            # Strings have another hash in every process.
            return Score(reward=score.reward - hash(text) % 97 / 1000, success=score.success)
        if self.fault == "range":
            return Score(reward=score.reward - 0.5, success=score.success)
        if self.fault == "slow" and "```" in text:
            time.sleep(60)
        if self.fault == "stingy" and score.success:
            return Score(reward=0.9, success=True)
        return score
