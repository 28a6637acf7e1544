"""What came out of a comparison's runs, as plain data that statistics and reports read.

No torch here: a report can be written anew on a machine that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["done", "failed", "unfinished"]
BudgetKind = Literal["steps", "tokens", "updates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the things compared: the common configuration with declared differences."""

    name: str
    differences: Mapping[str, Any]
    """Dotted setting -> value, for every setting that is not the common one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation of a run on the held-out prompts."""

    step: int
    tokens: int
    """Sampled for training until then."""
    updates: int
    """Optimizer steps until then."""
    seconds: float
    """Of training until then, without evaluations, and from the second step on: the answers of the
    first are shared, and only one run has spent time on them."""
    right: Mapping[str, bool]
    """Prompt id -> whether the greedy answer is right. The same prompts, in order, everywhere."""

    @property
    def accuracy(self) -> float:
        """Share of the prompts answered right."""
        return sum(self.right.values()) / len(self.right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
    first_answers: str = ""
    """Name of the answers of the first step: runs with the same one learned from the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report is made of."""

    name: str
    command: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    """How much of it every run was given."""
    outcomes: tuple[Outcome, ...]
    findings: tuple[Mapping[str, str], ...] = ()
    """What was said before training: covey.analysis.plan.findings.Finding.row() of each."""
    environment: Mapping[str, Any] = ()  # type: ignore[assignment] # filled by the runner
    config_toml: str = ""
    """The common configuration."""

    def of(self, arm: str) -> tuple[Outcome, ...]:
        """Return the runs of an arm, by seed."""
        mine = (o for o in self.outcomes if o.arm == arm)
        return tuple(sorted(mine, key=lambda o: o.seed))
