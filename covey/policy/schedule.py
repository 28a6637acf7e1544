"""The learning rate of each optimizer step, and the budget that ends a run.

The learning rate is a pure function of a run's progress. The learning rate of optimizer step v is:

    warmup   peak * (v + 1) / warmup_steps                while v < warmup_steps
    after    peak * shape(fraction of the rest done)      constant, linear or cosine

A run with a budget of tokens does not know its number of optimizer steps in advance. With a budget
of tokens, v in the formula is the used fraction of the budget times `total_steps`. The value
`total_steps` is the number of optimizer steps in `train.steps` training steps.

To add a shape of the schedule, also add its name to the settings `schedule` in
`covey/config/schema.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from covey.config import Config
from covey.config.schema import Train
from covey.errors import RunError

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The numbers of training steps, tokens and optimizer steps that a run has used so far."""

    steps: int = 0
    tokens: int = 0
    updates: int = 0
    """Number of optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the number of optimizer steps taken so far."""

    peak: float
    shape: Shape
    warmup_steps: int
    total_steps: int
    budget: Budget | None = None
    """The budget of a run that ends after a number of tokens; None for other runs."""

    def __call__(self, version: int, start: Used) -> float:
        """Return the learning rate of the optimizer step that follows `version` optimizer steps.

        `start` is the run's progress at the start of the training step. With a budget of tokens,
        `start` determines the position in the schedule at the start of the training step. Each
        optimizer step of the training step advances the position in the schedule by one.
        """
        place: float = version
        if self.budget is not None:
            train = self.budget.settings
            spent = self.budget.spent(start)
            place = spent * train.steps * train.optimizer_steps + version - start.updates
        if place < self.warmup_steps:
            return self.peak * min(1.0, (place + 1) / self.warmup_steps)
        if self.shape == "constant":
            return self.peak
        done = (place - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        left = max(0.0, 1.0 - done)
        cosine = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return self.peak * (left if self.shape == "linear" else cosine)


def schedule_of(config: Config) -> Schedule:
    settings, train = config.optimizer, config.train
    ratio = math.ceil(settings.warmup_ratio * train.total_optimizer_steps)
    return Schedule(
        peak=settings.learning_rate,
        shape=settings.schedule,
        warmup_steps=settings.warmup_steps or ratio,
        total_steps=train.total_optimizer_steps,
        budget=Budget(settings=train) if train.budget == "tokens" else None,
    )


def sft_schedule(config: Config, steps: int) -> Schedule:
    """Return the schedule of an SFT run of `steps` optimizer steps."""
    settings = config.sft
    return Schedule(
        peak=settings.learning_rate,
        shape=settings.schedule,
        warmup_steps=settings.warmup_steps,
        total_steps=steps,
    )


# The length of a run: a number of training steps, or a budget of tokens or optimizer steps.
#
# The cost of a training step differs between algorithms: dynamic sampling may sample several times
# per step, and longer completions cost more. To compare algorithms fairly, a run may end after a
# given number of sampled tokens or optimizer steps. Learning rate, evaluations and reward weights
# then depend on the used fraction of the budget: half of a token budget counts as half of
# `train.steps`.

PATIENCE = 20
"""A run with a budget of optimizer steps fails if it takes more than PATIENCE times the planned
number of training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of a run: a maximum number of training steps, tokens or optimizer steps."""

    settings: Train

    def spent(self, used: Used) -> float:
        """Return the used fraction of the budget: 0 at the start, 1 or a little more at the end."""
        return self._count(used) / self.settings.amount

    def over(self, used: Used) -> bool:
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
