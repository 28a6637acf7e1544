"""Runs health checks on metrics, tracks the best step, and decides whether to stop early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from covey.records.best import Best, check_part, metric_of
from covey.records.folder import RunFolder
from covey.records.health import Finding, Health
from covey.records.metric_registry import current_name
from covey.records.trackers import Tracker
from covey.stopping import StopSignal

if TYPE_CHECKING:
    from covey.config import Config
    from covey.evaluation.evaluate import Evaluation


@dataclass(slots=True)
class Watch(Tracker):
    """A tracker that tells the training loop when to save a checkpoint and when to stop.

    Each rank has its own `Watch`, because all ranks must save after the same steps.
    """

    config: Config
    health: Health = field(init=False)
    best: Best | None = field(init=False, default=None)
    new: list[Finding] = field(default_factory=list)
    """Problems that the health checks found and `report` has not logged yet."""
    is_best: bool = False
    """Whether the last step has the best value so far of the metric `save.best`."""

    def __post_init__(self) -> None:
        self.health = Health(self.config.model_dump())
        if self.config.save.best:
            save = self.config.save
            self.best = Best(metric=metric_of(save.best), mode=save.best_is)

    def replay(self, run: RunFolder, until: int) -> None:
        """Restore the state of this `Watch` from the run's records up to step `until`."""
        rows = [row for row in run.steps() if row["step"] <= until]
        for row in rows:
            self.health.add(row)
        if self.best is None:
            return
        if self.best.of_evaluations:
            rows = [row for row in run.evaluations() if row["step"] <= until]
        else:
            rows = [row for row in rows if self._is_saved(row["step"])]
        for row in rows:
            self.best.add(row)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Run the health checks on the metrics of a step."""
        row = {current_name(name): value for name, value in metrics.items()}
        self.new += self.health.add(row)
        best = self.best
        self.is_best = (
            best is not None
            and not best.of_evaluations
            and self._is_saved(row["step"])
            and best.add(row)
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Compare an evaluation with the best evaluation so far."""
        best, row = self.best, {"step": step, **evaluation.row()}
        if best is not None and best.of_evaluations:
            if best.step is None:
                check_part(best.metric, row)
            self.is_best = best.add(row) and step > 0

    def _is_saved(self, step: int) -> bool:
        """Whether `save.every` requires a checkpoint of `step`; only a saved step can be best."""
        every = self.config.save.every
        return every > 0 and step % every == 0

    def report(self, log: Tracker, stop: StopSignal) -> None:
        """Log new health problems; stop the run if `train.stop_on` or `train.patience` says so."""
        for finding in self.new:
            log.note(f"health: {finding.line()}")
        self.new.clear()
        ends = [name for name in self.config.train.stop_on if name in self.health.active]
        patience, best = self.config.train.patience, self.best
        if ends:
            stop.ask(f"train.stop_on: {ends[0]} since step {self.health.active[ends[0]].since}")
        elif patience and best is not None and best.misses >= patience:
            stop.ask(f"train.patience: {best.misses} measurements not better than {best.line()}")
