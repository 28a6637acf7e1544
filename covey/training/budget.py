"""How long a run is: a number of training steps, or a budget of tokens or optimizer steps.

Algorithms differ in what a training step costs: dynamic sampling samples several times, long
completions have more tokens. To compare them on equal terms a run may end at the first step that
reaches a number of sampled tokens, or of optimizer steps. Whatever is otherwise counted in steps
(learning-rate schedule, evaluations, reward weights that change) then follows the share of the
budget that is spent, as if the whole were `train.steps` steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.train import Train
from covey.errors import RunError

PATIENCE = 20
"""With a budget of optimizer steps: fail after this many times the expected training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a run has used so far."""

    steps: int = 0
    tokens: int = 0
    updates: int = 0
    """Optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may use."""

    settings: Train

    @property
    def amount(self) -> int:
        """How many training steps, tokens or optimizer steps."""
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
        """Whether a multiple of `every` steps' worth of budget lies between two moments."""
        worth = every * self.amount
        marks = [self._count(u) * self.settings.steps // worth for u in (before, after)]
        return marks[1] > marks[0]

    def _count(self, used: Used) -> int:
        return int(getattr(used, self.settings.budget))
