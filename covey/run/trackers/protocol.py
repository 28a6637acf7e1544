"""The tracker interface: a tracker receives metrics, evaluations, tables and notes.

To add a tracker, subclass `Tracker` and override the methods of the events that the tracker needs.
The training loop reports every event to all trackers of a run, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation


class Tracker:
    """Receives the events of a run. By default, every method does nothing."""

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Training begins.

        The run has `steps` steps, of which `done` are finished; each step has `rollouts` rollouts.
        """

    def sampled(self, count: int) -> None:
        """`count` more completions of the current step or evaluation are finished."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A training step is done; `metrics` are the metrics of the step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The evaluation after training step `step` is done."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A step has a new table, with a row per rollout or per held-out prompt."""

    def note(self, text: str) -> None:
        """Covey has a message for the user."""

    def close(self) -> None:
        """The run has ended, successfully or not."""


class Trackers(Tracker):
    """Several trackers combined into one. Every event is passed to each tracker, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)


def _to_each(event: str) -> Callable[..., None]:
    def report(self: Trackers, *arguments: Any, **named: Any) -> None:
        for tracker in self.trackers:
            getattr(tracker, event)(*arguments, **named)

    return report


for _event in [name for name in vars(Tracker) if not name.startswith("_")]:
    setattr(Trackers, _event, _to_each(_event))
