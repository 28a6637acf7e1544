"""The interface through which the training loop runs RL or SFT."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from covey.run.folder import RunFolder
from covey.run.trackers import Tracker
from covey.training.build import Components
from covey.training.checkpoint import State
from covey.training.schedule import Budget


class Trainer(Protocol):
    """The methods that the training loop calls; RL and SFT each implement them."""

    @property
    def parts(self) -> Components:
        """The policy, engine, scorers and other components of the run."""

    @property
    def budget(self) -> Budget:
        """The length of the run in training steps, tokens or optimizer steps."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts (RL) or solutions (SFT) per training step."""

    @property
    def evaluate_every(self) -> int:
        """Number of steps between evaluations; 0 means no evaluations."""

    def fresh(self) -> State:
        """Return the state at the start of a new run."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare the first step after `checkpoint`, which is None in a new run."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Run training step number `state.step`, and log its metrics."""

    def save(self, folder: Path, step: int) -> None:
        """Add files to a step's checkpoint that this trainer needs to resume."""

    def close(self) -> None:
        """Stop all background work."""
