"""The tracker interface, and the tracker that writes metrics and rollouts to the run folder.

A tracker receives metrics, evaluations, tables and notes. The training loop reports every event to
all trackers of a run, in order. To write a tracker, subclass `Tracker`, and override the methods of
the events that the tracker needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation
    from covey.records.folder import RunFolder


class Tracker:
    """Receives the events of a run; by default, every method does nothing."""

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Called when training begins.

        The run has `steps` steps, of which `done` are finished. Each step has `rollouts` rollouts.
        """

    def sampled(self, count: int) -> None:
        """Called when `count` more completions of a step or of an evaluation are finished."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Called after a training step, with the metrics of the step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Called after an evaluation. `step` is the last training step before the evaluation."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called with a table that has one row per rollout of a step, or one row per held-out
        prompt."""

    def note(self, text: str) -> None:
        """Called with a message for the user."""

    def close(self) -> None:
        """Called when the run has ended, successfully or not."""


class Trackers(Tracker):
    """A tracker that passes every event to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)


def _to_each(event: str) -> Callable[..., None]:
    def report(self: Trackers, *arguments: Any, **named: Any) -> None:
        for tracker in self.trackers:
            getattr(tracker, event)(*arguments, **named)

    return report


for _event in [name for name in vars(Tracker) if not name.startswith("_")]:
    setattr(Trackers, _event, _to_each(_event))


class JsonlTracker(Tracker):
    """Appends to steps.jsonl and eval.jsonl, and writes the rollouts of each step to a file."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Remove failure.txt, the traceback of an earlier failed attempt at this run."""
        self.run.clear_failure()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.run.log_step(dict(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.run.log_evaluation({"step": step, **evaluation.row()})

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.write_table(name, step, rows)
