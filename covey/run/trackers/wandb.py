"""The Weights & Biases tracker.

With WANDB_MODE=offline, W&B writes to the run folder, and `wandb sync` uploads the data later. The
environment variables of wandb, such as WANDB_PROJECT and WANDB_ENTITY, have their usual effect.
"""

from __future__ import annotations

import os
from typing import Any

from covey.errors import ConfigError
from covey.escape import printable
from covey.run.trackers.external import PROJECT, RememberingTracker


class WandbTracker(RememberingTracker):
    """Logs metrics and completions to W&B. A resumed run continues the same W&B run."""

    name = "wandb"

    def open(self, done: int) -> None:
        """Start or continue the W&B run. If W&B fails, raise an error that says what to do."""
        import wandb

        try:
            self._start(wandb, done)
        except wandb.errors.Error as error:
            first = str(error).strip().partition("\n")[0].partition(". ")[0]
            why = printable(first).rstrip(".")
            raise ConfigError(
                f"config: trackers: wandb cannot start: {why}; run `wandb login`, set "
                "WANDB_MODE=offline, or set trackers = []"
            ) from None
        self.remember()

    def _start(self, wandb: Any, done: int) -> None:
        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.run.path.name,
            id=self.known["id"],
            resume="allow" if done else None,
            dir=str(self.run.path),
            config=dict(self.settings),
            settings=wandb.Settings(console="off", quiet=True),  # notes may quote text of a model
        )
