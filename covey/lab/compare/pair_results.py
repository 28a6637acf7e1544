"""Results of every pair of arms: the better algorithm, and the better final checkpoints.

A test over seeds decides which *algorithm* is better. Each seed is a separate training run and
counts as one measurement. To be significant, the difference between two arms must be large compared
with the variation between seeds. A test over prompts decides which of two *checkpoints* is better.
The tests and intervals are described in docs/statistics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from covey.evaluation.intervals import Estimate, likely_bounds, paired_difference
from covey.lab.compare import statistics
from covey.lab.compare.comparison import Metric, RunResult
from covey.lab.compare.statistics import FEW_SEEDS, LEVEL, Array, Bounds

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
    difference: float
    """The first arm's mean minus the second arm's mean."""
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
    """The mean difference with its interval over seeds. The intervals of all pairs contain their
    true differences together with 95 % confidence, so an interval excludes 0 if and only if
    `p_corrected` is below 5 %. `difference` is None with fewer than three seeds, or if both arms
    have equal final weights in every seed.
    """
    difference_new_prompts: Estimate | None
    """The mean difference, with an interval that covers the choice of seeds and of prompts, for all
    pairs together."""
    p_value: float | None
    """The two-sided p-value of the test over seeds, before the correction for several pairs."""
    p_corrected: float | None
    """`p_value` times the number of tested pairs (Bonferroni)."""
    p_student: float | None
    """The p-value of the paired t-test alone, before the correction. It does not consider runs that
    end very differently from all seeds."""
    p_sign: float | None
    """The p-value of the exact sign test over seeds, before the correction."""
    cancelling_share: float | None
    """The share of runs, unlike all seeds, that would make the means equal if these runs of one
    arm ended at the lowest or the highest possible value."""
    decision: Decision
    better: str | None
    """The name of the significantly better arm, or None if neither arm is significantly better."""
    seeds_needed: int | None
    """The number of seeds needed to detect the observed difference with 80 % power. `seeds_needed`
    is None if `decision` is not "cannot tell", or if more than MOST_SEEDS seeds would be needed."""
    detectable: float | None
    """A difference that this number of seeds detects with at least 80 % power; the statement holds
    with a probability of 90 %."""
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
    def bounds(self) -> Bounds:
        """The lowest and the highest possible value: 0 and 1 for success."""
        return (0.0, 1.0) if self.by == "success" else likely_bounds([self.a, self.b])

    @property
    def means(self) -> tuple[Array, Array]:
        """The mean values of both arms for each seed."""
        return self.a.mean(axis=1), self.b.mean(axis=1)

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
    level = LEVEL / max(1, sum(pair.tested for pair in pairs))
    return tuple(
        _result(pair, level, missing[pair.first] + missing[pair.second], checkpoints)
        for pair, checkpoints in zip(pairs, _checkpoints(pairs), strict=True)
    )


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
    pair: _Pair, level: float, missing: tuple[str, ...], checkpoints: tuple[CheckpointResult, ...]
) -> PairResult:
    """Build the result of a pair. `level` is the level of its test, corrected for several pairs."""
    differences = pair.differences if pair.seeds else np.zeros(0)
    result = PairResult(
        first=pair.first,
        second=pair.second,
        seeds=pair.seeds,
        missing=missing,
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()) if pair.seeds else None,
        difference=None,
        difference_new_prompts=None,
        p_value=None,
        p_corrected=None,
        p_student=None,
        p_sign=None,
        cancelling_share=None,
        decision=_decide(pair),
        better=None,
        seeds_needed=None,
        detectable=None,
        checkpoints=checkpoints,
        by=pair.by,
    )
    if not pair.tested:
        return result
    (a, b), bounds, items = pair.means, pair.bounds, pair.a.shape[1]
    mean, span = float(differences.mean()), bounds[1] - bounds[0]
    p_value = float(statistics.seed_test(a, b, items, bounds))
    low, high = (float(end) for end in statistics.seed_bounds(a, b, items, bounds, level))
    other = statistics.change(pair.a - pair.b, span, level)
    decision, needed = result.decision, None
    if decision == "cannot tell" and p_value < level:
        decision = "better"
    elif decision == "cannot tell":
        deviation = float(statistics.seed_deviation(differences, items, span))
        worse = min(float(a.mean()), float(b.mean()))
        needed = statistics.seeds_needed(mean, deviation, level, worse, bounds)
    return replace(
        result,
        difference=Estimate(mean, low, high),
        difference_new_prompts=Estimate(mean, min(low, other.low), max(high, other.high)),
        p_value=p_value,
        p_corrected=min(1.0, p_value * LEVEL / level),
        p_student=float(statistics.student_test(differences, items, span)),
        p_sign=statistics.sign_test(differences.tolist()),
        cancelling_share=float(statistics.cancelling_share(a, b, bounds)),
        decision=decision,
        better=None if decision != "better" else pair.first if mean > 0 else pair.second,
        seeds_needed=needed,
        detectable=statistics.detectable(a, b, items, bounds, level),
    )


def _decide(pair: _Pair) -> Decision:
    """Return what is known of a pair before the test over seeds."""
    if not pair.seeds:
        return "nothing to compare"
    if pair.same:
        return "same policy"
    if len(pair.seeds) == 1:
        return "one seed"
    if np.array_equal(pair.a, pair.b):
        return "no difference"
    return "cannot tell" if pair.tested else "two seeds"


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
                difference=each.estimate.value,
                gained=each.gained,
                lost=each.lost,
                p_value=each.p_value,
                p_holm=next(p_holm),
            )
            for seed, each in zip(pair.seeds, results, strict=False)  # empty for the same policy
        )
        for pair, results in zip(pairs, found, strict=True)
    ]
