"""The `environment` reward: the reward that the environment itself gives to the episode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from covey.rewards.score import Reward, Score
from covey.types import Prompt, episode_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReward(Reward):
    """The reward that the environment gives to an episode.

    The reward is the result of the environment's `reward` method. If the environment has no
    `reward` method, the reward is the sum of the turn rewards. An episode with a reward of at least
    `success_at` is a success.
    """

    success_at: float = 1.0

    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        episode = episode_of(text)
        if episode is None:
            raise ValueError("the reward 'environment' needs an episode; set environment.name")
        given = [reward for reward in episode.turn_rewards if reward is not None]
        # An episode that was cut off before its first reward has a reward of 0.
        if episode.outcome is None and not given and episode.finish == "stop":
            raise ValueError("the environment gives no reward: neither `reward` nor turn rewards")
        parts = {"turns": math.fsum(given)} if episode.outcome is None else dict(episode.outcome)
        total = math.fsum(parts.values())
        return Score(reward=total, success=total >= self.success_at, parts=parts)
