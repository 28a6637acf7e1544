"""What a verdict consists of: plain data.

Two questions are kept apart for every pair of arms. Which *algorithm* is better is asked of seeds:
each is one more training run, and the scatter between them is what a difference must exceed. Which
of two *checkpoints* is better is asked of problems, with the weights as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from covey.evaluate.intervals import Estimate

Decision = Literal[
    "same policy", "no difference", "better", "cannot tell", "one seed", "nothing to compare"
]
"""same policy: weights agree bit for bit in every seed. no difference: accuracies do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How soon an arm reaches an accuracy: medians over seeds, None if half of them do not."""

    accuracy: float
    reached: int
    """How many of its finished seeds do."""
    budget: float | None
    """In the unit of the comparison's budget."""
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """A seed that ended far below where it had been, by more than chance."""

    seed: int
    before: float
    final: float
    kind: Literal["half of its best lost", "below its start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """One arm over its finished seeds. Estimates are None if there are none."""

    arm: str
    seeds: int
    missing: tuple[str, ...]
    """One line for each run that is not there to be counted."""
    initial: Estimate | None
    final: Estimate | None
    """Mean over seeds; the interval counts seeds and problems."""
    improvement: Estimate | None
    """Final less initial."""
    best: Estimate | None
    """Of each seed's highest accuracy: picked by the problems that measure it, hence too high."""
    area: Estimate | None
    """Mean accuracy over the budget that all runs have in common; the interval is over seeds."""
    reach: tuple[Reach, ...]
    collapsed: tuple[Collapse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The two final checkpoints of a seed on the same problems: which of these is better."""

    seed: int
    difference: Estimate
    """First less second; a bootstrap over problems."""
    gained: int
    """Problems that only the first answers right."""
    lost: int
    p_value: float
    """McNemar's exact test."""
    p_holm: float
    """The same by Holm's correction over all pairs and seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """Two arms over the seeds that both finished: which algorithm is better."""

    first: str
    second: str
    seeds: tuple[int, ...]
    missing: tuple[str, ...]
    differences: tuple[float, ...]
    """Final accuracy of first less second, seed by seed."""
    mean: float | None
    """Of these. None without a common seed."""
    difference: Estimate | None
    """The mean with Student's interval over seeds. None with fewer than two."""
    other_problems: Estimate | None
    """The same with an interval that also counts that other problems might have been asked."""
    p_value: float | None
    """Two-sided, paired t over seeds: what decides, after Holm's correction."""
    p_holm: float | None
    sign_flip_p: float | None
    """Exact, assuming no distribution. None below six seeds, where it cannot get under 5 %."""
    decision: Decision
    better: str | None
    """The arm that is better, if one is."""
    seeds_needed: int | None
    """For 80 % power if difference and scatter are as seen; None if decided, or beyond the cap."""
    detectable: float | None
    """The difference that so many seeds with such scatter find 80 times in 100."""
    checkpoints: tuple[Checkpoints, ...]
    words: str = ""
    """Which algorithm is better, in plain words."""
    checkpoint_words: str = ""
    """Which of the checkpoints are better, in plain words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All that can be said of a comparison."""

    headline: str
    cautions: tuple[str, ...]
    """What a reader must know before believing: missing runs, few seeds, collapses."""
    complete: bool
    """Every planned run is there."""
    arms: tuple[ArmVerdict, ...]
    pairs: tuple[PairVerdict, ...]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
