"""The JSON Lines tracker writes metrics, evaluations and rollouts to the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.run.folder import RunFolder
from covey.run.trackers.protocol import Tracker

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation


class JsonlTracker(Tracker):
    """Appends to steps.jsonl and eval.jsonl, and writes the rollouts of each step to a file."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Remove failure.txt, the traceback of an earlier failed attempt at this run."""
        self.run.clear_failure()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step to steps.jsonl."""
        self.run.log_step(dict(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Append an evaluation."""
        self.run.log_evaluation({"step": step, **evaluation.row()})

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table of a step, such as the step's rollouts, to a JSON Lines file."""
        self.run.write_table(name, step, rows)
