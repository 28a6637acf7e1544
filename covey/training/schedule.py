"""The learning rate of each optimizer step, and the end of a run.

The learning rate is a pure function of a run's progress. For optimizer step v, it is

    warmup   peak * (v + 1) / warmup_steps                while v < warmup_steps
    after    peak * shape(fraction of the rest done)      constant, linear or cosine

A run with a budget of tokens does not know its number of optimizer steps in advance, so v is the
used fraction of the tokens, times the number of optimizer steps in `train.steps` training steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from covey.config import Config
from covey.config.schema import Train
from covey.errors import RunError

Shape = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: float,
    *,
    peak: float,
    schedule: Shape,
    warmup_steps: int,
    total_steps: int,
    start: float = 0.0,
    since: int = 0,
) -> float:
    """Return the learning rate of the optimizer step that follows `step` optimizer steps.

    `start` is the position in the schedule after `since` optimizer steps; each later one advances
    it by one.
    """
    place = start + step - since
    if place < warmup_steps:
        return peak * min(1.0, (place + 1) / warmup_steps)
    if schedule == "constant":
        return peak
    done = (place - warmup_steps) / max(1, total_steps - warmup_steps)
    left = max(0.0, 1.0 - done)
    return peak * (left if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left))))


def schedule_of(config: Config, used: Used) -> Callable[[int], float]:
    """Return the learning rate as a function of the number of optimizer steps taken so far.

    The schedule is that of the next training step, given the budget used so far.
    """
    settings, train = config.optimizer, config.train
    schedule = partial(
        learning_rate,
        peak=settings.learning_rate,
        schedule=settings.schedule,
        warmup_steps=settings.warmup_steps
        or math.ceil(settings.warmup_ratio * train.total_optimizer_steps),
        total_steps=train.total_optimizer_steps,
    )
    if train.budget != "tokens":
        return schedule
    spent = Budget(settings=train).spent(used)
    return partial(schedule, start=spent * train.steps * train.optimizer_steps, since=used.updates)


# The length of a run: a number of training steps, or a budget of tokens or optimizer steps.
#
# The cost of a training step differs between algorithms: dynamic sampling may sample several times
# per step, and longer completions cost more. To compare algorithms fairly, a run may end after a
# given number of sampled tokens or optimizer steps. Learning rate, evaluations and reward weights
# then depend on the used fraction of the budget: half of a token budget counts as half of
# `train.steps`.

PATIENCE = 20
"""A run with a budget of optimizer steps may take at most this many times the expected number of
training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """How many training steps, tokens and optimizer steps a run has used so far."""

    steps: int = 0
    tokens: int = 0
    updates: int = 0
    """Number of optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of a run: a maximum number of training steps, tokens or optimizer steps."""

    settings: Train

    def spent(self, used: Used) -> float:
        """Return the used fraction of the budget: 0 at the start, 1 or a little more at the end."""
        return self._count(used) / self.settings.amount

    def over(self, used: Used) -> bool:
        """Return whether the budget is used up, so that the run ends."""
        settings = self.settings
        if self._count(used) >= settings.amount:
            return True
        if settings.budget == "updates":
            most = PATIENCE * -(-settings.amount // settings.optimizer_steps)
            if used.steps > most:
                raise RunError(
                    f"the run took only {used.updates} of {settings.amount} optimizer steps "
                    f"(train.stop_after) in {used.steps} training steps, because most training "
                    "steps have no group to train on; use easier prompts, or another filter"
                )
        return False

    def passed(self, every: int, before: Used, after: Used) -> bool:
        """Return whether a run passed a multiple of `every` steps between `before` and `after`."""
        worth = every * self.settings.amount
        marks = [self._count(u) * self.settings.steps // worth for u in (before, after)]
        return marks[1] > marks[0]

    def _count(self, used: Used) -> int:
        return int(getattr(used, self.settings.budget))
