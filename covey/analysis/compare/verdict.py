"""From the runs of a comparison to what can be said of them, which reports print.

docs/statistics.md says which tests and intervals these are, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from covey.analysis.compare import statistics, words
from covey.analysis.compare.agreement import finished
from covey.analysis.compare.course import arm_verdicts
from covey.analysis.compare.judged import (
    ArmVerdict,
    Checkpoints,
    Collapse,
    Decision,
    PairVerdict,
    Reach,
    Verdict,
)
from covey.analysis.compare.outcome import Comparison, Outcome
from covey.analysis.compare.statistics import LEVEL, Array
from covey.errors import RunError
from covey.evaluate.intervals import paired_difference

__all__ = ["ArmVerdict", "Checkpoints", "Collapse", "PairVerdict", "Reach", "Verdict", "verdict"]

Runs = Mapping[str, Mapping[int, Outcome]]
"""Arm -> seed -> its finished run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two arms at their end, on the seeds that both finished and on the same problems."""

    first: str
    second: str
    seeds: tuple[int, ...]
    a: Array
    """[seeds, problems]: whether the first is right."""
    b: Array
    same: bool
    """All weights agree."""

    @property
    def differences(self) -> Array:
        """First less second, seed by seed; counted before divided, so that equal ones are equal."""
        counts = self.a.sum(axis=1).astype(int) - self.b.sum(axis=1).astype(int)
        return np.asarray(counts / self.a.shape[1])

    @property
    def tested(self) -> bool:
        """Whether the question of algorithms is put: to two seeds or more, of unequal weights."""
        return len(self.seeds) >= 2 and not self.same


def verdict(comparison: Comparison) -> Verdict:
    """Judge a comparison. Runs that did not finish are named and counted in no number."""
    runs: Runs = {
        arm.name: {run.seed: run for run in finished(comparison.of(arm.name))}
        for arm in comparison.arms
    }
    _check_problems(runs)
    missing = {arm.name: _missing(comparison, arm.name) for arm in comparison.arms}
    pairs = _pair_verdicts(runs, missing)
    arms = arm_verdicts(comparison, runs, missing)
    return Verdict(
        headline=words.headline(arms, pairs),
        cautions=words.cautions(arms, pairs, _as_if_untrained(comparison, runs, pairs)),
        complete=not any(missing.values()),
        arms=arms,
        pairs=pairs,
    )


def _check_problems(runs: Runs) -> None:
    first: Outcome | None = None
    for run in (run for by_seed in runs.values() for run in by_seed.values()):
        first = first or run
        for point in run.points:
            if list(point.right) != list(first.points[0].right):
                raise RunError(
                    f"{run.arm} seed {run.seed}, step {point.step}: not evaluated on the problems "
                    f"of {first.arm} seed {first.seed}; remove one of the two and run it again"
                )


def _missing(comparison: Comparison, arm: str) -> tuple[str, ...]:
    """Return a line for each planned run that did not come to its end."""
    there = {run.seed: run for run in comparison.of(arm)}
    lines = []
    for seed in sorted({*comparison.seeds, *there}):
        run = there.get(seed)
        if run is None:
            lines.append(f"{arm} seed {seed}: not run")
        elif run.state != "done":
            lines.append(f"{arm} seed {seed}: {run.state}{run.error and f', {run.error}'}")
        elif not run.points:
            lines.append(f"{arm} seed {seed}: done, but never evaluated")
    return tuple(lines)


def _pair_verdicts(runs: Runs, missing: Mapping[str, tuple[str, ...]]) -> tuple[PairVerdict, ...]:
    pairs = [_pair(runs, *names) for names in itertools.combinations(runs, 2)]
    tested = [pair for pair in pairs if pair.tested]
    p_values = [float(statistics.seed_test(p.differences, p.a.shape[1])) for p in tested]
    corrected = statistics.holm(p_values)
    by_seeds = {
        (pair.first, pair.second): values
        for pair, *values in zip(tested, p_values, corrected, strict=True)
    }
    checkpoints = _checkpoints(pairs)
    found = []
    for pair in pairs:
        names = (pair.first, pair.second)
        p_value, p_holm = by_seeds.get(names, (None, None))
        judged = _judge(pair, p_value, p_holm, level=LEVEL / max(1, len(tested)))
        judged = replace(
            judged,
            missing=missing[pair.first] + missing[pair.second],
            checkpoints=checkpoints[names],
        )
        judged = replace(judged, checkpoint_words=words.of_checkpoints(judged))
        found.append(replace(judged, words=words.of_pair(judged, tested=len(tested))))
    return tuple(found)


def _pair(runs: Runs, first: str, second: str) -> _Pair:
    seeds = tuple(seed for seed in runs[first] if seed in runs[second])
    ends = [[runs[arm][seed] for seed in seeds] for arm in (first, second)]
    a, b = (
        np.array([list(run.points[-1].right.values()) for run in mine], dtype=float)
        for mine in ends
    )
    same = bool(seeds) and all(
        one.weights == other.weights != "" for one, other in zip(*ends, strict=True)
    )
    return _Pair(first=first, second=second, seeds=seeds, a=a, b=b, same=same)


def _judge(pair: _Pair, p_value: float | None, p_holm: float | None, level: float) -> PairVerdict:
    """Answer which algorithm is better."""
    several = len(pair.seeds) >= 2
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
        deviation = float(statistics.seed_deviation(differences, items))
        detectable = statistics.detectable(deviation, len(pair.seeds), level)
        if decision == "cannot tell":
            needed = statistics.seeds_needed(mean, deviation, level)
    return PairVerdict(
        first=pair.first,
        second=pair.second,
        seeds=pair.seeds,
        missing=(),
        differences=tuple(differences.tolist()),
        mean=mean,
        difference=statistics.seed_interval(differences, items) if pair.tested else None,
        other_problems=statistics.change(pair.a - pair.b) if several else None,
        p_value=p_value,
        p_holm=p_holm,
        sign_flip_p=statistics.sign_flip_test(differences.tolist()) if pair.tested else None,
        decision=decision,
        better=better,
        seeds_needed=needed,
        detectable=detectable,
        checkpoints=(),
    )


def _decide(pair: _Pair, p_holm: float | None) -> Decision:
    if not pair.seeds:
        return "nothing to compare"
    if pair.same:
        return "same policy"
    if p_holm is None:
        return "one seed"
    if np.array_equal(pair.a, pair.b):
        return "no difference"
    return "better" if p_holm < LEVEL else "cannot tell"


def _checkpoints(pairs: list[_Pair]) -> dict[tuple[str, str], tuple[Checkpoints, ...]]:
    """Compare the final checkpoints of every pair, seed by seed; one correction over them all."""
    found = [
        (pair, seed, paired_difference(pair.a[row].tolist(), pair.b[row].tolist()))
        for pair in pairs
        for row, seed in enumerate(pair.seeds)
        if not pair.same
    ]
    corrected = statistics.holm([difference.p_value for _, _, difference in found])
    result: dict[tuple[str, str], tuple[Checkpoints, ...]] = {
        (pair.first, pair.second): () for pair in pairs
    }
    for (pair, seed, difference), p_holm in zip(found, corrected, strict=True):
        result[pair.first, pair.second] += (
            Checkpoints(
                seed=seed,
                difference=difference.estimate,
                gained=difference.gained,
                lost=difference.lost,
                p_value=difference.p_value,
                p_holm=p_holm,
            ),
        )
    return result


def _as_if_untrained(
    comparison: Comparison, runs: Runs, pairs: tuple[PairVerdict, ...]
) -> dict[tuple[str, str], float]:
    """Return mean differences where each failed run counts as having stayed where it began.

    Only for pairs that have such runs: how much they might matter.
    """
    starts = {
        arm: run.points[0].accuracy for arm, by_seed in runs.items() for run in by_seed.values()
    }
    failed = {(o.arm, o.seed) for o in comparison.outcomes if o.state == "failed"}

    def end(arm: str, seed: int) -> float | None:
        if (arm, seed) in failed:
            return starts.get(arm)
        return runs[arm][seed].points[-1].accuracy if seed in runs[arm] else None

    found = {}
    for pair in pairs:
        ends = [(end(pair.first, seed), end(pair.second, seed)) for seed in comparison.seeds]
        both = [a - b for a, b in ends if a is not None and b is not None]
        if pair.seeds and len(both) > len(pair.seeds):
            found[pair.first, pair.second] = sum(both) / len(both)
    return found
