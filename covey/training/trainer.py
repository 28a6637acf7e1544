"""The base class of what the training loop runs: reinforcement learning (rl.py) or SFT (sft.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covey.run.folder import RunFolder
from covey.run.trackers import Tracker
from covey.training.build import Components
from covey.training.schedule import Budget, State


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Runs the steps of a run; the default methods suit a trainer without state of its own."""

    parts: Components
    """The policy, engine, scorers and other components of the run."""
    budget: Budget
    """The length of the run in training steps, tokens or optimizer steps."""
    rollouts: int
    """Number of rollouts (RL) or solutions (SFT) per training step, without the additional rounds
    of dynamic sampling."""
    evaluate_every: int
    """Number of steps between evaluations; 0 means no evaluations."""
    fresh: State
    """The state at the start of a new run."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare the first step after `checkpoint`, which is None in a new run."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Run training step number `state.step`, and log its metrics."""
        raise NotImplementedError

    def save(self, folder: Path, step: int) -> None:
        """Add files to a step's checkpoint that this trainer needs to resume."""

    def close(self) -> None:
        """Stop all background work."""
