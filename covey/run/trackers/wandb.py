"""The Weights & Biases tracker. WANDB_MODE=offline writes to the run folder, for `wandb sync`.

WANDB_PROJECT, WANDB_ENTITY and the other variables of wandb hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from covey.run.trackers.external import COLUMNS, PROJECT, RememberingTracker


class WandbTracker(RememberingTracker):
    """A run of W&B, with tables of completions. A resumed run continues it."""

    name = "wandb"
    session: Any = None

    def open(self, done: int) -> None:
        """Begin or continue the run of W&B."""
        import wandb

        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.run.path.name,
            id=self.known["id"],
            resume="allow" if done else None,
            dir=str(self.run.path),
            config=dict(self.settings),
            settings=wandb.Settings(
                console="off", quiet=True
            ),  # notes may quote what a model wrote
        )
        self.remember()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; those of its evaluation join the same row."""
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        """Send or write what is left."""
        if self.session is not None:
            self.session.finish()
