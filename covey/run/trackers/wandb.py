"""The Weights & Biases tracker. WANDB_MODE=offline writes to the run folder, for `wandb sync`.

WANDB_PROJECT, WANDB_ENTITY and the other environment variables of wandb apply.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from covey.run.trackers.external import COLUMNS, PROJECT, RememberingTracker


class WandbTracker(RememberingTracker):
    """Logs to a W&B run, with tables of completions. A resumed run continues the same W&B run."""

    name = "wandb"
    session: Any = None

    def open(self, done: int) -> None:
        """Start or continue the W&B run."""
        import wandb

        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.run.path.name,
            id=self.known["id"],
            resume="allow" if done else None,
            dir=str(self.run.path),
            config=dict(self.settings),
            settings=wandb.Settings(console="off", quiet=True),  # notes may quote text of a model
        )
        self.remember()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; wandb adds the step's evaluation to the same row."""
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        """Send or write the remaining data."""
        if self.session is not None:
            self.session.finish()
