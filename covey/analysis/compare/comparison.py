"""The data of a comparison: arms, runs, evaluations. Statistics and reports read these types.

No torch here: a report can be written on a machine without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["done", "failed", "unfinished"]
BudgetKind = Literal["steps", "tokens", "updates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison: the common configuration with declared differences."""

    name: str
    settings: tuple[str, ...] = ()
    """Overrides of the common settings, such as optimizer.learning_rate=0."""
    seed_offset: int = 0
    """Added to every seed: other prompts and other completions, but nothing else."""
    differences: Mapping[str, Any] = field(default_factory=dict)
    """Dotted setting -> value, for every setting that differs from the common configuration; None
    where the arm's algorithm has no such option. Filled by design.py."""

    @property
    def text(self) -> str:
        """The arm in the syntax of `--arm`."""
        moved = [f"seed+={self.seed_offset}"] if self.seed_offset else []
        return f"{self.name}: {', '.join([*self.settings, *moved])}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation of a run on the held-out prompts."""

    step: int
    tokens: int
    """Sampled for training so far."""
    updates: int
    """Optimizer steps so far."""
    seconds: float
    """Training time so far, without evaluations and without the first step: its completions are
    shared, and only one run spent time on them."""
    correct: Mapping[str, bool]
    """Prompt id -> whether the greedy completion is correct. All runs have the same prompts in the
    same order."""

    @property
    def accuracy(self) -> float:
        """Share of the prompts with a correct completion."""
        return sum(self.correct.values()) / len(self.correct)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run: an arm with a seed."""

    arm: str
    seed: int
    state: State
    error: str = ""
    """Why it failed, in one line."""
    points: tuple[Point, ...] = ()
    folder: str = ""
    """Relative to the comparison's folder."""
    weights: str = ""
    """Digest of the final weights: equal digests are the same policy, bit for bit."""
    first_rollouts: str = ""
    """Name of the first step's rollouts: runs with the same name learned from the same ones."""
    memory_gib: float = 0.0
    """Peak memory: of the GPU's tensors, or without a GPU of the whole process; 0: not known."""
    cpu_seconds: float = 0.0
    """CPU time of its process, evaluations included; 0: not known. If the run was resumed, both are
    those of its last process."""

    @property
    def finished(self) -> bool:
        """Whether the run reached its end and was evaluated there."""
        return self.state == "done" and bool(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report is made from."""

    name: str
    command: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    """Size of the budget of each run."""
    runs: tuple[RunResult, ...]
    findings: tuple[Mapping[str, str], ...] = ()
    """What was known before training: rows of covey.analysis.plan.findings.Finding."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    config_toml: str = ""
    """The common configuration."""

    def runs_of(self, arm: str) -> tuple[RunResult, ...]:
        """Return the runs of an arm, by seed."""
        return tuple(sorted((r for r in self.runs if r.arm == arm), key=lambda run: run.seed))

    def finished_runs(self) -> dict[str, tuple[RunResult, ...]]:
        """Return the finished runs of each arm, by seed."""
        return {
            arm.name: tuple(run for run in self.runs_of(arm.name) if run.finished)
            for arm in self.arms
        }
