"""The Weights & Biases tracker. WANDB_MODE=offline writes to the run folder, for `wandb sync`.

WANDB_PROJECT, WANDB_ENTITY and the other environment variables of wandb apply.
"""

from __future__ import annotations

import os

from covey.run.trackers.external import PROJECT, RememberingTracker


class WandbTracker(RememberingTracker):
    """Logs to a W&B run, with tables of completions. A resumed run continues the same W&B run."""

    name = "wandb"

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
