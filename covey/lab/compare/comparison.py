"""The data of a comparison that statistics and reports read: arms, runs and evaluations.

This module does not import torch, so a report can be written on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

State = Literal["done", "failed", "unfinished"]
BudgetKind = Literal["steps", "tokens", "updates"]
Metric = Literal["success", "reward"]
"""The metric that compares the arms: the fraction of correct completions, or the mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm of a comparison: its name, and the common settings that it overrides."""

    name: str
    settings: tuple[str, ...] = ()
    """The settings that the arm overrides, such as `optimizer.learning_rate=0`."""
    seed_offset: int = 0
    """A number added to every seed of this arm, so that the arm gets different prompts and
    completions than the other arms."""
    differences: Mapping[str, Any] = field(default_factory=dict)
    """Maps each setting that differs from the common configuration to the arm's value, or to None
    if the arm's algorithm does not have the setting. The module design.py fills in `differences`.
    """

    @property
    def text(self) -> str:
        """The arm in the format of the `--arm` option."""
        moved = [f"seed+={self.seed_offset}"] if self.seed_offset else []
        return f"{self.name}: {', '.join([*self.settings, *moved])}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation of a run on the held-out prompts."""

    step: int
    tokens: int
    """The number of tokens that the run has sampled for training so far."""
    updates: int
    """The number of optimizer steps so far."""
    seconds: float
    """The training time so far, without evaluations and without the first step, which includes
    compilation and other work that is done once."""
    correct: Mapping[str, bool]
    """Maps each prompt id to whether the prompt's greedy completion is correct. All runs are
    evaluated on the same prompts in the same order.
    """
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Maps each prompt id to the reward and the reward components (`parts/NAME`) of its greedy
    completion. `rewards` omits prompts whose completion could not be scored."""
    distinct_answers: int | None = None
    """The number of different final answers among the greedy completions."""
    by: Metric = "success"

    @property
    def accuracy(self) -> float:
        """The fraction of prompts with a correct completion."""
        return sum(self.correct.values()) / len(self.correct)

    @property
    def values(self) -> tuple[float, ...]:
        """The success (1 or 0) or the reward of each prompt's completion, depending on `by`.

        A completion without a score gets the lowest reward of the evaluation.
        """
        if self.by == "success":
            return tuple(map(float, self.correct.values()))
        lowest = min(row["reward"] for row in self.rewards.values())
        return tuple(self.rewards.get(name, {"reward": lowest})["reward"] for name in self.correct)

    @property
    def value(self) -> float:
        """The mean of `values`: the accuracy, or the mean reward."""
        return sum(self.values) / len(self.correct)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run, as outcome.json stores it."""

    key: str
    """Digests of all inputs that determine the run's result and of the code, as `Job.key`."""
    state: State
    error: str = ""
    """The reason why the run failed, in one line."""
    weights: str = ""
    """The digest of the final weights; equal digests mean that the weights are bit-identical."""
    memory_gib: float = 0.0
    """The peak memory of the tensors on the GPU or, without a GPU, of the process; 0 if unknown."""
    cpu_seconds: float = 0.0
    """The CPU time of the run's process, including evaluations; 0 if unknown. For a resumed run,
    `memory_gib` and `cpu_seconds` cover only the last process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(RunOutcome):
    """One run of a comparison: its arm, seed, outcome and evaluations."""

    arm: str
    seed: int
    key: str = ""
    points: tuple[Point, ...] = ()
    unreadable: tuple[int, ...] = ()
    """The steps whose evaluations are damaged or missing."""
    folder: str = ""
    """The path of the run folder, relative to the comparison's folder."""

    @property
    def finished(self) -> bool:
        """Whether the run reached its end, and has its first and its last evaluation."""
        if self.state != "done" or not self.points:
            return False
        first, last = self.points[0].step, self.points[-1].step
        return all(first < step < last for step in self.unreadable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms, runs and evaluations of a comparison, from which Covey writes the report."""

    name: str
    command: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    """The budget of each run, in the unit that `budget` names."""
    runs: tuple[RunResult, ...]
    findings: tuple[Mapping[str, str], ...] = ()
    """Possible problems that were found before training, in the format of `Finding.row()`."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    config_toml: str = ""
    """The common configuration."""
    best_constant: float | None = None
    """The best accuracy of a policy that gives every held-out prompt the same answer, or None if
    unknown."""

    @property
    def by(self) -> Metric:
        """The metric that compares the arms."""
        points = (point for run in self.runs for point in run.points)
        return next((point.by for point in points), "success")

    def runs_of(self, arm: str) -> tuple[RunResult, ...]:
        """Return the runs of an arm, ordered by seed."""
        return tuple(sorted((r for r in self.runs if r.arm == arm), key=lambda run: run.seed))

    def finished_runs(self) -> dict[str, tuple[RunResult, ...]]:
        """Return the finished runs of each arm, ordered by seed."""
        return {
            arm.name: tuple(run for run in self.runs_of(arm.name) if run.finished)
            for arm in self.arms
        }


def compared_by(runs: Iterable[RunResult]) -> Metric:
    """Choose the metric that compares the arms of a comparison.

    Some reward functions only give grades and never mark a completion as correct. If no completion
    is correct, arms are compared by mean reward, unless all rewards are equal or an evaluation has
    no rewards.
    """
    points = [point for run in runs for point in run.points]
    if any(any(point.correct.values()) for point in points):
        return "success"
    rewards = {row["reward"] for point in points for row in point.rewards.values()}
    scored = all(point.rewards for point in points)
    return "reward" if len(rewards) > 1 and scored else "success"


def with_metric(run: RunResult, by: Metric) -> RunResult:
    """Return a copy of the run in which every evaluation uses the metric `by`."""
    return replace(run, points=tuple(replace(point, by=by) for point in run.points))
