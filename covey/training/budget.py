"""The length of a run: a number of training steps, or a budget of tokens or optimizer steps.

The cost of a training step differs between algorithms. For example, dynamic sampling may sample
several times per step, and longer completions cost more. To compare algorithms fairly, a run may
end after a given number of sampled tokens or optimizer steps. Learning rate, evaluations and reward
weights depend on the used fraction of the budget. For example, half of a token budget counts as
half of `train.steps`.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.train import Train
from covey.errors import RunError

PATIENCE = 20
"""A run with a budget of optimizer steps fails if it needs this many times the expected number of
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
    """The budget of a run in training steps, tokens or optimizer steps."""

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
        """Return whether a multiple of `every` steps was reached between `before` and `after`."""
        worth = every * self.amount
        marks = [self._count(u) * self.settings.steps // worth for u in (before, after)]
        return marks[1] > marks[0]

    def _count(self, used: Used) -> int:
        return int(getattr(used, self.settings.budget))
