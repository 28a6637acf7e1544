"""The interface between the training loop and a kind of training, RL or SFT."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from covey.run.folder import RunFolder
from covey.run.trackers import Tracker
from covey.training.build import Components
from covey.training.checkpoint import State
from covey.training.schedule import Budget


class Trainer(Protocol):
    """The interface of RL training and SFT training for the training loop."""

    @property
    def parts(self) -> Components:
        """The components of the run."""

    @property
    def budget(self) -> Budget:
        """The length of the run."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts, or of SFT examples, in a step."""

    @property
    def evaluate_every(self) -> int:
        """Number of steps between evaluations; 0 means no evaluations."""

    def fresh(self) -> State:
        """Return the state at the start of a new run."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare for the first step after the given checkpoint; None means a new run."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Take training step number `state.step`, and log it."""

    def save(self, folder: Path, step: int) -> None:
        """Write additional files, which a resumed run needs, into a step's checkpoint."""

    def close(self) -> None:
        """Stop all background work."""
