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
    """One kind of training: all that the loop does not know of it."""

    @property
    def parts(self) -> Components:
        """What the run is made of."""

    @property
    def budget(self) -> Budget:
        """How long the run is."""

    @property
    def rollouts(self) -> int:
        """Rollouts, or examples, of a step."""

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations. 0: there are none."""

    def fresh(self) -> State:
        """Return the state of a run that begins."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare for the first step, after the given checkpoint. None: the run begins."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Take training step number `state.step`, and log it."""

    def save(self, folder: Path, step: int) -> None:
        """Add to the checkpoint of a step what resuming after it needs, beside the state."""

    def close(self) -> None:
        """End what works beside the loop."""
