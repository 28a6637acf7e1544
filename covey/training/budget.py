"""How long a run is: so many steps, or what it takes to spend a budget of tokens or updates.

Algorithms differ in what a step costs: dynamic sampling asks again and again, long answers have
more tokens. To compare them on equal terms a run may end at the first step that reaches an amount
of tokens sampled, or of optimizer steps taken. What is counted in steps otherwise (the schedule of
the learning rate, evaluations, weights of rewards that change) then follows the share of the budget
that is spent, as if the whole were `train.steps` steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from covey.config.schema import Train
from covey.errors import RunError

if TYPE_CHECKING:
    from covey.training.update import UpdateSettings

PATIENCE = 20
"""With a budget of updates: give up after so many times the steps that it should have taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a run has used so far."""

    steps: int
    tokens: int
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may use."""

    settings: Train

    @property
    def amount(self) -> int:
        """How many steps, tokens or updates."""
        return self.settings.amount

    def spent(self, used: Used) -> float:
        """Return the share that is spent: 0 at the start, 1 or a little more at the end."""
        return self._count(used) / self.amount

    def over(self, used: Used) -> bool:
        """Whether the run ends here."""
        settings = self.settings
        if self._count(used) >= self.amount:
            return True
        if settings.budget == "updates":
            most = PATIENCE * -(-self.amount // settings.updates)
            if used.steps > most:
                raise RunError(
                    f"after {used.steps} steps only {used.updates} of the {self.amount} optimizer "
                    "steps of train.stop_after were taken: most steps have nothing to learn from"
                )
        return False

    def passed(self, every: int, before: Used, after: Used) -> bool:
        """Whether a multiple of `every` steps' worth lies between two moments."""
        worth = every * self.amount
        marks = [self._count(u) * self.settings.steps // worth for u in (before, after)]
        return marks[1] > marks[0]

    def paced(self, settings: UpdateSettings, used: Used) -> UpdateSettings:
        """Let the learning rate of a step follow the budget, where updates do not tell."""
        if self.settings.budget != "tokens":
            return settings
        rate = settings.learning_rate
        # The rate knows a run of this many optimizer steps; stand where the tokens say we are.
        start = self.spent(used) * self.settings.steps * self.settings.updates
        return replace(settings, learning_rate=lambda v: rate(start + v - used.updates))

    def _count(self, used: Used) -> int:
        return int(getattr(used, self.settings.budget))
