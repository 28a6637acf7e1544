"""Short real runs of the embedded model, to check the claims of findings."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from covey.config import load_config
from covey.config.resolve import resolve
from covey.loop import train
from covey.records.folder import RunFolder
from covey.run import Run
from covey.stopping import StopSignal
from tests.trackers import Notes

SHORT = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", "evaluate.every=0", "save.every=0",
    "save.rollouts=false", "model.device=cpu",
)  # fmt: skip


class Ran(NamedTuple):
    """Metrics and final weights of a run."""

    steps: list[dict[str, Any]]
    weights: torch.Tensor

    def __getitem__(self, metric: Any) -> Any:
        """Return a metric of the last step."""
        return self.steps[-1][metric]


@cache
def ran(*settings: str, steps: int = 1) -> Ran:
    """Train the embedded model on its recipe."""
    overrides = [*SHORT, f"train.steps={steps}", *settings]
    parts = Run.build(resolve(load_config("arithmetic", overrides)))
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", "", {})
        train(parts, run, [Notes()], StopSignal())
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.steps()]
    parameters = parts.policy.model.model.parameters()
    return Ran(rows, torch.cat([p.detach().flatten() for p in parameters]))


def starting_weights() -> torch.Tensor:
    """Return the initial weights of every run."""
    parts = Run.build(resolve(load_config("arithmetic", SHORT)))
    parameters = parts.policy.model.model.parameters()
    return torch.cat([p.detach().flatten() for p in parameters])
