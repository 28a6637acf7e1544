"""Runs health checks on metrics, tracks the best step, and decides whether to stop early."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from covey.errors import ConfigError, closest, nearest
from covey.records.folder import RunFolder, settings_of
from covey.records.health import Finding, Health
from covey.records.metric_registry import MACHINE, METRICS, current_name, is_number, metric
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
        best, row = self.best, {"step": step, **evaluation.row()}
        if best is not None and best.of_evaluations:
            if best.step is None:
                check_part(best.metric, row)
            self.is_best = best.add(row) and step > 0

    def _is_saved(self, step: int) -> bool:
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


# Finds a run's best step by one metric, for early stopping and for keeping the best checkpoint.


NUMBERS = ("greedy", "reward", "mean_tokens", "unscored", "distinct_answers", "best_constant")
"""Names of the numbers of every evaluation."""


@dataclass(slots=True, kw_only=True)
class Best:
    """The best value of one metric so far, and the step that had this value."""

    metric: str
    """The name of an evaluation metric, such as `greedy` or `pass@4`, or of a step metric."""
    mode: Literal["highest", "lowest"] = "highest"
    step: int | None = None
    """The first step with the best value of the metric; None before the first measurement."""
    value: float = 0.0
    misses: int = 0
    """Number of measurements of the metric since the best step."""

    @property
    def of_evaluations(self) -> bool:
        return metric(self.metric) is None

    def add(self, row: Mapping[str, Any]) -> bool:
        value = measured(row, self.metric)
        if value is None:
            return False
        better = value > self.value if self.mode == "highest" else value < self.value
        if self.step is not None and not better:
            self.misses += 1
            return False
        self.step, self.value, self.misses = row["step"], value, 0
        return True

    def line(self) -> str:
        return f"step {self.step} with {self.metric} {self.value:.4g}"


def metric_of(name: str) -> str:
    """Return the metric that a value of `save.best` means.

    A name of a training step's metric means that metric. All other names are of evaluations, as
    tables and trackers show them: `evaluation/NAME` and `greedy: NAME` mean NAME, and a plain word
    that is no number of evaluations is a part of the reward.

    >>> metric_of("correct"), metric_of("greedy: correct"), metric_of("evaluation/greedy")
    ('parts/correct', 'parts/correct', 'greedy')
    """
    if metric(name) is not None:
        return name
    name = name.removeprefix("evaluation/").removeprefix("greedy: ")
    return f"parts/{name}" if re.fullmatch(r"\w+", name) and name not in NUMBERS else name


def measured(row: Mapping[str, Any], name: str) -> float | None:
    """Return the value of the metric `name` in a row, or None if it is missing or not finite."""
    value = row.get(name)
    value = value.get("value") if isinstance(value, Mapping) else value
    return value if is_number(value) else None


def best_of(run: RunFolder) -> Best | None:
    """Return the step with the best value of `save.best` among all steps with a checkpoint.

    Return None if `save.best` is not set, or if no step with a checkpoint has the metric that
    `save.best` names.
    """
    save = settings_of(run).get("save", {})
    if not save.get("best"):
        return None
    best = Best(metric=metric_of(save["best"]), mode=save.get("best_is", "highest"))
    kept = dict(run.checkpoints())
    for row in run.evaluations() if best.of_evaluations else run.steps():
        if row["step"] in kept:
            best.add(row)
    return None if best.step is None else best


def best_step(run: RunFolder) -> int | None:
    best = best_of(run)
    return None if best is None else best.step


def best_checkpoint(run: RunFolder) -> Path | None:
    step = best_step(run)
    return None if step is None else dict(run.checkpoints())[step]


def check_metric(name: str, *, samples: int) -> None:
    """Raise ConfigError for an unknown, renamed or machine-dependent metric.

    Parts of the reward are known only after an evaluation; `check_part` checks them then.
    """
    own, present = metric(name), current_name(name)
    if own is None and metric(present) is not None:
        raise ConfigError(f"config: save.best: the metric {name!r} was renamed to {present!r}")
    if own is not None:
        if own.source == MACHINE:
            raise ConfigError(
                f"config: save.best: the metric {name!r} depends on the machine; choose a metric "
                "that is the same on every machine"
            )
        return
    powers = [2**power for power in range(1, samples.bit_length())]
    known = [
        "greedy",
        "reward",
        *([f"mean@{samples}"] if samples else []),
        *(f"pass@{k}" for k in powers),
    ]
    wanted = metric_of(name)
    is_part = wanted.startswith("parts/") and not closest(wanted.removeprefix("parts/"), known)
    if wanted not in (*known, *NUMBERS) and not is_part:
        choices = [*known, *METRICS] if closest(name, METRICS) else known
        raise ConfigError(
            f"config: save.best: {name!r} is not a metric of training steps or of evaluations "
            f"with evaluate.samples = {samples}{nearest(name, choices)}"
        )


def check_part(name: str, row: Mapping[str, Any]) -> None:
    """Raise ConfigError if the first evaluation of a run, `row`, lacks the metric `name`."""
    if name not in row:
        known = [
            key for key, value in row.items() if isinstance(value, Mapping) and "value" in value
        ]
        raise ConfigError(
            f"config: save.best: the evaluations of this run have no metric {name!r}"
            f"{nearest(name, known)}"
        )
