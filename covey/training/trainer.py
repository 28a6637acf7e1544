"""The interface of a kind of training: reinforcement learning, or supervised training."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from covey.run.folder import RunFolder
from covey.run.trackers import Tracker
from covey.training.budget import Budget
from covey.training.build import Components
from covey.training.checkpoint import State


class Trainer(Protocol):
    """A kind of training, RL or SFT: its step and settings, which the loop calls."""

    @property
    def parts(self) -> Components:
        """The parts of the run."""

    @property
    def budget(self) -> Budget:
        """The length of the run."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts, or of SFT examples, in a step."""

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0 means no evaluations."""

    def fresh(self) -> State:
        """Return the state at the start of a new run."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare for the first step after the given checkpoint, or of a new run if None."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Take training step number `state.step`, and log it."""

    def save(self, folder: Path, step: int) -> None:
        """Add files to the checkpoint of a step that a resumed run needs beside the state."""

    def close(self) -> None:
        """End work in the background."""
