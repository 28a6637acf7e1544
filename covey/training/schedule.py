"""Compute the learning rate of each optimizer step, and decide when a run ends.

The learning rate is a pure function of the progress of a run.

The learning rate of optimizer step v is given by the following formulas:

    warmup   peak * (v + 1) / warmup_steps                while v < warmup_steps
    after    peak * shape(fraction of the rest done)      constant, linear or cosine

A run with a budget of tokens does not know its number of optimizer steps in advance. With a token
budget, v is therefore a product: the used fraction of the tokens, times the number of optimizer
steps that `train.steps` training steps take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from covey.config import Config
from covey.config.schema import Train
from covey.errors import RunError

Shape = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: float, *, peak: float, schedule: Shape, warmup_steps: int, total_steps: int
) -> float:
    """Return the learning rate at `step`, which counts from 0 and may be fractional."""
    if step < warmup_steps:
        return peak * min(1.0, (step + 1) / warmup_steps)
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = max(0.0, 1.0 - done)
    return peak * (left if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the number of optimizer steps taken so far."""

    peak: float
    shape: Shape
    warmup_steps: int
    total_steps: int
    start: float = 0.0
    """Position in the schedule after `since` optimizer steps. Each later optimizer step advances
    the position in the schedule by one."""
    since: int = 0

    def __call__(self, version: int) -> float:
        """Return the learning rate of the optimizer step that follows `version` optimizer steps."""
        return learning_rate(
            self.start + version - self.since,
            peak=self.peak,
            schedule=self.shape,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )


def total_updates(train: Train) -> int:
    """Return the number of optimizer steps of a run.

    With a token budget, return the number of optimizer steps in `train.steps` training steps.
    """
    return train.total_updates


def warmup_updates(config: Config) -> int:
    """Return the number of warm-up optimizer steps of a run."""
    settings = config.optimizer
    return settings.warmup_steps or math.ceil(settings.warmup_ratio * total_updates(config.train))


def schedule_of(config: Config, used: Used) -> Schedule:
    """Return the schedule for the next training step, given the budget used so far."""
    start, since = 0.0, 0
    if config.train.budget == "tokens":
        spent = Budget(settings=config.train).spent(used)
        start, since = spent * config.train.steps * config.train.updates, used.updates
    return Schedule(
        peak=config.optimizer.learning_rate,
        shape=config.optimizer.schedule,
        warmup_steps=warmup_updates(config),
        total_steps=total_updates(config.train),
        start=start,
        since=since,
    )


def sft_schedule_of(config: Config, steps: int) -> Schedule:
    """Return the schedule of supervised training over the given number of optimizer steps."""
    return Schedule(
        peak=config.sft.learning_rate,
        shape=config.sft.schedule,
        warmup_steps=config.sft.warmup_steps,
        total_steps=steps,
    )


# The length of a run: a number of training steps, or a budget of tokens or optimizer steps.
#
# The cost of a training step differs between algorithms. For example, dynamic sampling may sample
# several times per step, and longer completions cost more. To compare algorithms fairly, a run
# may end after a given number of sampled tokens or optimizer steps. Learning rate, evaluations
# and reward weights depend on the used fraction of the budget. For example, half of a token
# budget counts as half of `train.steps`.

PATIENCE = 20
"""A run with a budget of optimizer steps may take at most this many times the expected number of
training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Numbers of training steps, tokens and optimizer steps that a run has used so far."""

    steps: int = 0
    tokens: int = 0
    updates: int = 0
    """Number of optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The budget of a run: a maximum number of training steps, tokens or optimizer steps."""

    settings: Train

    @property
    def amount(self) -> int:
        """The size of the budget: a number of training steps, tokens or optimizer steps."""
        return self.settings.amount

    def spent(self, used: Used) -> float:
        """Return the used fraction of the budget: 0 at the start, 1 or a little more at the end."""
        return self._count(used) / self.amount

    def over(self, used: Used) -> bool:
        """Return whether the budget is used up, so that the run ends."""
        settings = self.settings
        if self._count(used) >= self.amount:
            return True
        if settings.budget == "updates":
            most = PATIENCE * -(-self.amount // settings.updates)
            if used.steps > most:
                raise RunError(
                    f"the run took only {used.updates} of {self.amount} optimizer steps "
                    f"(train.stop_after) in {used.steps} training steps, because most training "
                    "steps have no group to train on; use easier prompts, or another filter"
                )
        return False

    def passed(self, every: int, before: Used, after: Used) -> bool:
        """Return whether a run passed a multiple of `every` steps between `before` and `after`."""
        worth = every * self.amount
        marks = [self._count(u) * self.settings.steps // worth for u in (before, after)]
        return marks[1] > marks[0]

    def _count(self, used: Used) -> int:
        return int(getattr(used, self.settings.budget))
