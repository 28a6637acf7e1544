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
"""The metric by which arms are compared: the fraction of correct completions, or mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm of a comparison: the common configuration with some settings changed."""

    name: str
    settings: tuple[str, ...] = ()
    """Overrides of the common settings, such as optimizer.learning_rate=0."""
    seed_offset: int = 0
    """A number added to every seed of this arm, so that it draws other prompts and samples other
    completions."""
    differences: Mapping[str, Any] = field(default_factory=dict)
    """Maps each setting that differs from the common configuration to its value, or to None if the
    arm's algorithm does not have it. Filled by design.py.
    """

    @property
    def text(self) -> str:
        """The arm as the `--arm` option would give it."""
        moved = [f"seed+={self.seed_offset}"] if self.seed_offset else []
        return f"{self.name}: {', '.join([*self.settings, *moved])}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation of a run on the held-out prompts."""

    step: int
    tokens: int
    """Tokens that were sampled for training so far."""
    updates: int
    """Optimizer steps so far."""
    seconds: float
    """Training time so far, without evaluations and without the first step, because all arms share
    the completions of the first step and only one run spends time on generating them.
    """
    correct: Mapping[str, bool]
    """Maps each prompt id to whether the greedy completion is correct; all runs have the same
    prompts in the same order.
    """
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Maps prompt ids to the reward and components (`parts/NAME`) of the greedy completion. Prompts
    without a scored completion are left out."""
    distinct_answers: int | None = None
    """The number of different final answers among the greedy completions."""
    by: Metric = "success"

    @property
    def accuracy(self) -> float:
        """The fraction of prompts with a correct completion."""
        return sum(self.correct.values()) / len(self.correct)

    @property
    def values(self) -> tuple[float, ...]:
        """One number per prompt: success (1 or 0) or the reward, depending on `by`.

        A completion without a score counts as one with the lowest reward.
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
    """How a run ended (outcome.json)."""

    key: str
    """Digest of all inputs that determine a run (see launch.py)."""
    state: State
    error: str = ""
    """The reason why the run failed, in one line."""
    weights: str = ""
    """Digest of the final weights; equal digests mean that two policies are equal bit for bit."""
    first_rollouts: str = ""
    """The name of the first step's rollouts; two runs share the rollouts if the names are equal."""
    memory_gib: float = 0.0
    """Peak memory of the tensors on the GPU, or of the process if there is no GPU; 0 if unknown."""
    cpu_seconds: float = 0.0
    """CPU time of the run's process, including evaluations; 0 if unknown. For a resumed run, memory
    and CPU time cover only the last process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(RunOutcome):
    """One run: an arm with a seed, its outcome and its evaluations."""

    arm: str
    seed: int
    key: str = ""
    points: tuple[Point, ...] = ()
    folder: str = ""
    """The path of the run folder, relative to the comparison's folder."""

    @property
    def finished(self) -> bool:
        """Whether the run reached its end and has an evaluation."""
        return self.state == "done" and bool(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All data of a comparison that its report needs."""

    name: str
    command: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    """The budget of each run, in the unit that `budget` names."""
    runs: tuple[RunResult, ...]
    findings: tuple[Mapping[str, str], ...] = ()
    """Possible problems found before training, as dicts with the texts of `Finding.row()`."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    config_toml: str = ""
    """The common configuration."""
    best_constant: float | None = None
    """The best accuracy of one constant answer to all held-out prompts; None if unknown."""

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
    """Return the metric that compares arms: success, or reward if no completion is correct.

    Some reward functions only give grades and never mark a completion as correct. Arms are then
    compared by mean reward, if all evaluations have rewards and these differ.
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
