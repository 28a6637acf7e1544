"""Tracker for Weights & Biases (W&B)."""

from __future__ import annotations

import os

from covey.errors import ConfigError
from covey.escape import printable
from covey.records.trackers.external import PROJECT, RememberingTracker


class WandbTracker(RememberingTracker):
    """Logs metrics and completions to W&B; a resumed run continues the same W&B run.

    With WANDB_MODE=offline, W&B writes to the run folder, and `wandb sync` uploads the data later.
    WANDB_PROJECT, WANDB_ENTITY and the other variables of wandb have their usual effect.
    """

    name = "wandb"

    def open(self, done: int) -> None:
        import wandb

        try:
            self.session = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=self.run.path.name,
                id=self.known["id"],
                resume="allow" if done else None,
                dir=str(self.run.path),
                config=dict(self.settings),
                settings=wandb.Settings(console="off", quiet=True),  # notes may quote a model
            )
        except wandb.errors.Error as error:
            first = str(error).strip().partition("\n")[0].partition(". ")[0]
            why = printable(first).rstrip(".")
            raise ConfigError(
                f"config: trackers: wandb cannot start: {why}; run `wandb login`, set "
                "WANDB_MODE=offline, or set trackers = []"
            ) from None
        self.remember()
