"""Results of every pair of arms: the better algorithm, and the better final checkpoints.

A test over seeds decides which *algorithm* is better. Each seed is a separate training run and
counts as one measurement. To be significant, the difference between two arms must be large compared
with the variation between seeds. A test over prompts decides which of two *checkpoints* is better.
The tests and intervals are described in docs/statistics.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from covey.evaluation.intervals import Estimate, paired_difference
from covey.lab.compare import statistics
from covey.lab.compare.comparison import Metric, RunResult
from covey.lab.compare.statistics import FEW_SEEDS, LEVEL, Array

Decision = Literal[
    "same policy", "no difference", "better", "cannot tell", "one seed", "two seeds",
    "nothing to compare",
]  # fmt: skip
"""Two arms have the "same policy" if their weights are equal in every seed. Two arms have "no
difference" if their results are equal on every prompt. The decisions "one seed" and "two seeds"
mean that there are too few seeds to rank the arms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """The comparison of two arms' final checkpoints for one seed."""

    seed: int
    difference: Estimate
    """The first arm's mean minus the second arm's mean, with a bootstrap interval over prompts."""
    gained: int
    """The number of prompts that only the first arm's checkpoint solves."""
    lost: int
    p_value: float
    """The p-value of McNemar's exact test or, for rewards, of the sign test."""
    p_holm: float
    """The p-value after Holm's correction over all pairs and seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The comparison of two arms over the seeds that both arms finished."""

    first: str
    second: str
    seeds: tuple[int, ...]
    missing: tuple[str, ...]
    differences: tuple[float, ...]
    """For each seed, the first arm's final accuracy minus the second arm's final accuracy (or the
    difference of their mean rewards)."""
    mean: float | None
    """The mean of `differences`, or None if no seed has finished in both arms."""
    difference: Estimate | None
    """The mean difference with Student's t interval over seeds. `difference` is None with fewer
    than three seeds, or if both arms have equal final weights in every seed.
    """
    difference_new_prompts: Estimate | None
    """The mean difference, with an interval that covers the choice of seeds and of prompts."""
    p_value: float | None
    """The p-value of the two-sided paired t-test over seeds, before Holm's correction."""
    p_holm: float | None
    sign_flip_p: float | None
    """The p-value of the exact sign flip test, or None with fewer than six seeds."""
    decision: Decision
    better: str | None
    """The name of the significantly better arm, or None if neither arm is significantly better."""
    seeds_needed: int | None
    """The number of seeds needed to detect the observed difference with 80 % power. `seeds_needed`
    is None if `decision` is not "cannot tell", or if more than MOST_SEEDS seeds would be needed."""
    detectable: float | None
    """The smallest difference that a comparison with this number of seeds detects with 80 %
    power."""
    checkpoints: tuple[CheckpointResult, ...]
    summary: str = ""
    """A sentence that names the better algorithm, written by conclusion.py."""
    checkpoint_summary: str = ""
    """A sentence that names the better checkpoint for each seed, written by conclusion.py."""
    by: Metric = "success"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The final evaluations of two arms, on the seeds and prompts that the arms have in common."""

    first: str
    second: str
    seeds: tuple[int, ...]
    a: Array
    """The success or reward of the first arm's completions, with the shape [seeds, prompts]."""
    b: Array
    same: bool
    """Whether the final weights of the two arms are equal in every seed."""
    by: Metric

    @property
    def differences(self) -> Array:
        """The difference of the two arms' mean values for each seed (first minus second arm).

        The sums over prompts are subtracted before the division by the number of prompts, so that
        equal accuracies give exactly 0.
        """
        return np.asarray((self.a.sum(axis=1) - self.b.sum(axis=1)) / self.a.shape[1])

    @property
    def span(self) -> float:
        """The range of the compared values: 1 for success, or the range of observed rewards."""
        return 1.0 if self.by == "success" else float(np.ptp([self.a, self.b])) or 1.0

    @property
    def limit(self) -> float:
        """The largest possible difference between the mean values of two arms."""
        return 1.0 if self.by == "success" else math.inf

    @property
    def tested(self) -> bool:
        """Whether the pair has enough seeds for a test, and different final weights."""
        return len(self.seeds) >= FEW_SEEDS and not self.same


def pair_results(
    runs: Mapping[str, Sequence[RunResult]], missing: Mapping[str, tuple[str, ...]]
) -> tuple[PairResult, ...]:
    """Compare every pair of arms.

    `runs` maps each arm to its finished runs. `missing` maps each arm to one line per unfinished
    run.
    """
    pairs = [_pair(runs, *names) for names in itertools.combinations(runs, 2)]
    tested = [pair for pair in pairs if pair.tested]
    p_values = [float(statistics.seed_test(p.differences, p.a.shape[1], p.span)) for p in tested]
    corrected = iter(zip(p_values, statistics.holm(p_values), strict=True))
    level = LEVEL / max(1, len(tested))
    results = []
    for pair, checkpoints in zip(pairs, _checkpoints(pairs), strict=True):
        p_value, p_holm = next(corrected) if pair.tested else (None, None)
        lacking = missing[pair.first] + missing[pair.second]
        results.append(_result(pair, p_value, p_holm, level, lacking, checkpoints))
    return tuple(results)


def _pair(runs: Mapping[str, Sequence[RunResult]], first: str, second: str) -> _Pair:
    by_seed = [{run.seed: run for run in runs[arm]} for arm in (first, second)]
    seeds = tuple(seed for seed in by_seed[0] if seed in by_seed[1])
    ends = [[mine[seed] for seed in seeds] for mine in by_seed]
    a, b = (np.array([run.points[-1].values for run in mine], dtype=float) for mine in ends)
    same = bool(seeds) and all(
        one.weights == other.weights != "" for one, other in zip(*ends, strict=True)
    )
    by: Metric = next((run.points[-1].by for run in ends[0]), "success")
    return _Pair(first=first, second=second, seeds=seeds, a=a, b=b, same=same, by=by)


def _result(
    pair: _Pair,
    p_value: float | None,
    p_holm: float | None,
    level: float,
    missing: tuple[str, ...],
    checkpoints: tuple[CheckpointResult, ...],
) -> PairResult:
    """Build the result of a pair from its p-value before and after Holm's correction."""
    several = len(pair.seeds) >= FEW_SEEDS
    differences = pair.differences if pair.seeds else np.zeros(0)
    items = pair.a.shape[1] if pair.seeds else 0
    mean = float(differences.mean()) if pair.seeds else None
    decision = _decide(pair, p_holm)
    better = None
    if decision == "better":
        assert mean is not None
        better = pair.first if mean > 0 else pair.second
    needed = detectable = None
    if pair.tested:
        assert mean is not None
        deviation = float(statistics.seed_deviation(differences, items, pair.span))
        detectable = statistics.detectable(deviation, len(pair.seeds), level)
        if decision == "cannot tell":
            needed = statistics.seeds_needed(mean, deviation, level)
    return PairResult(
        first=pair.first,
        second=pair.second,
        seeds=pair.seeds,
        missing=missing,
        differences=tuple(differences.tolist()),
        mean=mean,
        difference=statistics.seed_interval(differences, items, pair.span, pair.limit)
        if pair.tested
        else None,
        difference_new_prompts=statistics.change(pair.a - pair.b, pair.limit) if several else None,
        p_value=p_value,
        p_holm=p_holm,
        sign_flip_p=statistics.sign_flip_test(differences.tolist()) if pair.tested else None,
        decision=decision,
        better=better,
        seeds_needed=needed,
        detectable=detectable,
        checkpoints=checkpoints,
        by=pair.by,
    )


def _decide(pair: _Pair, p_holm: float | None) -> Decision:
    if not pair.seeds:
        return "nothing to compare"
    if pair.same:
        return "same policy"
    if len(pair.seeds) == 1:
        return "one seed"
    if np.array_equal(pair.a, pair.b):
        return "no difference"
    if p_holm is None:
        return "two seeds"
    return "better" if p_holm < LEVEL else "cannot tell"


def _checkpoints(pairs: Sequence[_Pair]) -> list[tuple[CheckpointResult, ...]]:
    """Compare the final checkpoints of every pair and seed, and correct all p-values together."""
    found = [
        [
            paired_difference(a.tolist(), b.tolist(), span=1.0 if pair.by == "success" else None)
            for a, b in zip(pair.a, pair.b, strict=True)
        ]
        if not pair.same
        else []
        for pair in pairs
    ]
    p_holm = iter(statistics.holm([each.p_value for results in found for each in results]))
    return [
        tuple(
            CheckpointResult(
                seed=seed,
                difference=each.estimate,
                gained=each.gained,
                lost=each.lost,
                p_value=each.p_value,
                p_holm=next(p_holm),
            )
            for seed, each in zip(pair.seeds, results, strict=False)  # empty for the same policy
        )
        for pair, results in zip(pairs, found, strict=True)
    ]
