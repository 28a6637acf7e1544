"""The state of a run that a checkpoint saves, apart from its models.

A checkpoint stores the fields of `State` in covey.json (checkpoint.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.policy.policy import Policy


@dataclass(slots=True, kw_only=True)
class State:
    """The progress of a run: its counters and the weight of the KL penalty."""

    step: int = 0
    episode: int = 0
    """Number of rollouts sampled so far."""
    tokens: int = 0
    """Number of tokens sampled so far."""
    beta: float = 0.0
    """Weight of the KL penalty, which an objective may adapt during the run."""
    beta_setting: float | None = None
    """Value of objective.beta at the last start or resume; None in checkpoints of older
    versions."""
    evaluation_due: bool = False
    """Whether an evaluation of this step is due but has not run yet."""

    def used(self, policy: Policy) -> Used:
        """Return how many training steps, tokens and optimizer steps the run has used."""
        return Used(steps=self.step, tokens=self.tokens, updates=policy.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The numbers of training steps, tokens and optimizer steps that a run has used so far."""

    steps: int = 0
    tokens: int = 0
    updates: int = 0
    """Number of optimizer steps."""
