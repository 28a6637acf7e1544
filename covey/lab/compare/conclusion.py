"""Writes the conclusion of a comparison: a headline, cautions and a sentence per pair of arms."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from covey.errors import RunError
from covey.evaluation.intervals import Estimate, likely_bounds, paired_difference
from covey.lab.compare import statistics
from covey.lab.compare.arm_results import AXES, UNREADABLE, ArmResult, arm_results
from covey.lab.compare.comparison import Comparison, Metric, RunResult
from covey.lab.compare.statistics import FEW_SEEDS, LEVEL, MOST_SEEDS, Array
from covey.records.metric_registry import value_text

# Results of every pair of arms: the better algorithm, and the better final checkpoints.


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
    gained: int
    """The number of prompts that only the first arm's checkpoint solves."""
    lost: int
    p_value: float
    p_holm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The comparison of two arms over the seeds that both arms finished."""

    first: str
    second: str
    seeds: tuple[int, ...]
    missing: tuple[str, ...]
    differences: tuple[float, ...]
    mean: float | None
    difference: Estimate | None = None
    """The mean difference with its interval over seeds. The intervals of all pairs contain their
    true differences together with 95 % confidence, so an interval excludes 0 if and only if
    `p_corrected` is below 5 %. `difference` is None with fewer than three seeds, or if both arms
    have equal final weights in every seed.
    """
    difference_new_prompts: Estimate | None = None
    p_value: float | None = None
    p_corrected: float | None = None
    p_student: float | None = None
    p_sign: float | None = None
    cancelling_share: float | None = None
    decision: Decision
    better: str | None = None
    seeds_needed: int | None = None
    detectable: float | None = None
    checkpoints: tuple[CheckpointResult, ...] = ()
    summary: str = ""
    checkpoint_summary: str = ""
    by: Metric = "success"


def pair_results(
    runs: Mapping[str, Sequence[RunResult]], missing: Mapping[str, tuple[str, ...]]
) -> tuple[PairResult, ...]:
    """Compare every pair of arms over the seeds that both have finished."""
    pairs: list[tuple[PairResult, Array, Array]] = []
    for first, second in itertools.combinations(runs, 2):
        one, other = ({run.seed: run for run in runs[arm]} for arm in (first, second))
        seeds = tuple(seed for seed in one if seed in other)
        ends = [[mine[seed] for seed in seeds] for mine in (one, other)]
        # The success or reward of every completion, with the shape [seeds, prompts].
        a, b = (np.array([run.points[-1].values for run in mine], dtype=float) for mine in ends)
        decision: Decision = "cannot tell"
        if not seeds:
            decision = "nothing to compare"
        elif all(x.weights == y.weights != "" for x, y in zip(*ends, strict=True)):
            decision = "same policy"
        elif len(seeds) == 1:
            decision = "one seed"
        elif np.array_equal(a, b):
            decision = "no difference"
        elif len(seeds) < FEW_SEEDS:
            decision = "two seeds"
        # Sums are subtracted before the division, so that equal accuracies give exactly 0.
        differences = (a.sum(axis=1) - b.sum(axis=1)) / a.shape[1] if seeds else np.zeros(0)
        pair = PairResult(
            first=first,
            second=second,
            seeds=seeds,
            missing=missing[first] + missing[second],
            differences=tuple(differences.tolist()),
            mean=float(differences.mean()) if seeds else None,
            decision=decision,
            by=next((run.points[-1].by for run in ends[0]), "success"),
        )
        pairs.append((pair, a, b))
    level = LEVEL / max(1, sum(_is_tested(pair) for pair, _, _ in pairs))
    found = [
        [
            paired_difference(x.tolist(), y.tolist(), span=1.0 if pair.by == "success" else None)
            for x, y in zip(a, b, strict=True)
        ]
        if pair.decision != "same policy"
        else []
        for pair, a, b in pairs
    ]
    p_holm = iter(statistics.holm([each.p_value for results in found for each in results]))
    done = []
    for (pair, a, b), results in zip(pairs, found, strict=True):
        checkpoints = tuple(
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
        tested = _tested(pair, a, b, level) if _is_tested(pair) else pair
        done.append(replace(tested, checkpoints=checkpoints))
    return tuple(done)


def _is_tested(pair: PairResult) -> bool:
    return len(pair.seeds) >= FEW_SEEDS and pair.decision != "same policy"


def _tested(pair: PairResult, first: Array, second: Array, level: float) -> PairResult:
    """Test a pair at a level that is corrected for several pairs."""
    bounds = (0.0, 1.0) if pair.by == "success" else likely_bounds([first, second])
    a, b, items, span = (
        first.mean(axis=1),
        second.mean(axis=1),
        first.shape[1],
        bounds[1] - bounds[0],
    )
    differences, mean = np.array(pair.differences), pair.mean or 0.0
    p_value = float(statistics.seed_test(a, b, items, bounds))
    low, high = (float(end) for end in statistics.seed_bounds(a, b, items, bounds, level))
    other = statistics.change(first - second, span, level)
    decision, needed = pair.decision, None
    if decision == "cannot tell" and p_value < level:
        decision = "better"
    elif decision == "cannot tell":
        deviation = float(statistics.seed_deviation(differences, items, span))
        worse = min(float(a.mean()), float(b.mean()))
        needed = statistics.seeds_needed(mean, deviation, level, worse, bounds)
    return replace(
        pair,
        difference=Estimate(mean, low, high),
        difference_new_prompts=Estimate(mean, min(low, other.low), max(high, other.high)),
        p_value=p_value,
        p_corrected=min(1.0, p_value * LEVEL / level),
        p_student=float(statistics.student_test(differences, items, span)),
        p_sign=statistics.sign_test(pair.differences),
        cancelling_share=float(statistics.cancelling_share(a, b, bounds)),
        decision=decision,
        better=None if decision != "better" else pair.first if mean > 0 else pair.second,
        seeds_needed=needed,
        detectable=statistics.detectable(a, b, items, bounds, level),
    )


UNITS: Mapping[Metric, str] = {"success": "points", "reward": "in mean reward"}
TESTS: Mapping[Metric, str] = {"success": "McNemar's exact test", "reward": "sign test"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The conclusion of a comparison: sentences for the report, and results of arms and pairs."""

    headline: str
    cautions: tuple[str, ...]
    complete: bool
    arms: tuple[ArmResult, ...]
    pairs: tuple[PairResult, ...]

    @property
    def by(self) -> Metric:
        return next((arm.by for arm in self.arms if arm.seeds), "success")


def conclude(comparison: Comparison) -> Conclusion:
    """Return the conclusion of a comparison, from its finished runs only."""
    runs = comparison.finished_runs()
    finished = [run for mine in runs.values() for run in mine]
    for run, point in [(each, point) for each in finished for point in each.points]:
        if list(point.correct) != list(finished[0].points[0].correct):
            raise RunError(
                f"arm {run.arm} with seed {run.seed} and arm {finished[0].arm} with seed "
                f"{finished[0].seed} were evaluated on different prompts at step {point.step}; "
                "delete one of these two runs, and repeat the command"
            )
    arms = arm_results(comparison)
    pairs = pair_results(runs, {arm.arm: arm.missing for arm in arms})
    tested = sum(pair.p_value is not None for pair in pairs)
    pairs = tuple(
        replace(
            pair, summary=_pair_summary(pair, tested), checkpoint_summary=_checkpoint_summary(pair)
        )
        for pair in pairs
    )
    cautions = _cautions(arms, pairs, _as_if_untrained(comparison, finished, pairs))
    used = AXES[comparison.budget][1]
    early = [
        f"{run.arm} seed {run.seed} at {used(run.points[-1]):,} {comparison.budget}"
        for run in finished
        if used(run.points[-1]) < comparison.amount
    ]
    if early:
        cautions.append(
            f"Not all runs have a last evaluation at their budget of {comparison.amount:,} "
            f"{comparison.budget}: {'; '.join(early)}."
        )
    return Conclusion(
        headline=_headline(arms, pairs),
        cautions=tuple(cautions),
        complete=not any(arm.missing for arm in arms),
        arms=arms,
        pairs=pairs,
    )


def _as_if_untrained(
    comparison: Comparison, finished: Sequence[RunResult], pairs: Sequence[PairResult]
) -> list[str]:
    """Return sentences with each pair's mean difference, computed as if failed runs were untrained.

    An untrained run has the accuracy of its arm before training.
    """
    starts = {run.arm: run.points[0].value for run in finished}
    ends = {(run.arm, run.seed): run.points[-1].value for run in finished}
    for run in comparison.runs:
        if run.state == "failed" and run.arm in starts:
            ends[run.arm, run.seed] = starts[run.arm]
    found = []
    for pair in pairs:
        both = [
            ends[pair.first, seed] - ends[pair.second, seed]
            for seed in comparison.seeds
            if (pair.first, seed) in ends and (pair.second, seed) in ends
        ]
        if pair.seeds and len(both) > len(pair.seeds):
            found.append(
                f"If failed runs count as untrained, {pair.first} - {pair.second} is "
                f"{_change(sum(both) / len(both), pair.by)} instead of "
                f"{points(pair.mean or 0.0, pair.by)}."
            )
    return found


def _headline(arms: Sequence[ArmResult], pairs: Sequence[PairResult]) -> str:
    finished = [arm for arm in arms if arm.seeds]
    if not finished:
        return "No run has finished: there is nothing to compare."
    real = [pair for pair in pairs if pair.decision not in ("same policy", "nothing to compare")]
    if not real:
        return _nothing_to_test(finished, pairs)
    few = [pair for pair in real if pair.decision in ("one seed", "two seeds")]
    tested = [pair for pair in real if pair not in few]
    names = [arm.arm for arm in finished]
    few += [p for p in pairs if not p.seeds and p.first in names and p.second in names]
    if all(pair.decision == "one seed" for pair in real):
        return (
            "One seed cannot show which algorithm is better: another seed might reverse the order. "
            "Only these checkpoints can be compared; run at least three seeds."
        )
    if len(real) == 1 and not tested:
        return real[0].summary
    if not tested:
        return (
            "Too few seeds to rank the arms: two seeds do not show how much is chance. The tables "
            "have the result of each seed; run at least three."
        )
    untested = ""
    if few:
        missed = _listed([f"{pair.first} - {pair.second}" for pair in few])
        untested = f" Not tested, with fewer than {FEW_SEEDS} seeds in common: {missed}."
    if len(tested) == 1:
        return tested[0].summary + untested
    decided = [pair for pair in tested if pair.better]
    if not decided:
        widest = max(tested, key=lambda pair: abs(pair.mean or 0.0))
        return (
            f"No significant difference {'in the tested pairs' if few else 'between the arms'} "
            f"with this budget. The largest is between {widest.first} and {widest.second}: "
            f"{_change(widest.mean or 0.0, widest.by)}.{untested}"
        )
    for arm in finished:
        wins = [pair for pair in decided if pair.better == arm.arm]
        if len(wins) == len(finished) - 1:
            gains = (f"{_change(abs(p.mean or 0.0), p.by)} over {_loser(p)}" for p in wins)
            return f"{arm.arm} is better than every other arm: {', '.join(gains)}."
    found = ", ".join(f"{p.better} is better than {_loser(p)}" for p in decided)
    rest = "; the other pairs do not differ significantly" if len(decided) < len(tested) else ""
    start = "In the tested pairs" if few else "No arm is better than all others"
    return f"{start}: {found}{rest}.{untested}"


def _nothing_to_test(finished: Sequence[ArmResult], pairs: Sequence[PairResult]) -> str:
    if pairs and all(pair.decision == "same policy" for pair in pairs):
        names = _listed([arm.arm for arm in finished])
        return f"{names} are the same policy, bit for bit, in every seed: there is no difference."
    same = [pair.summary for pair in pairs if pair.decision == "same policy"]
    if same:
        return " ".join([*same, "No other two arms have finished the same seed."])
    if len(finished) == 1:
        return f"Only {finished[0].arm} has finished runs: there is nothing to compare it with."
    return "No two arms have finished the same seed: there is nothing to compare."


def _loser(pair: PairResult) -> str:
    return pair.second if pair.better == pair.first else pair.first


def _pair_summary(pair: PairResult, tested: int) -> str:
    both = f"{pair.first} and {pair.second}"
    seeds = count(len(pair.seeds), "seed")
    match pair.decision:
        case "nothing to compare":
            return f"{both} have no finished seed in common: there is nothing to compare."
        case "same policy":
            return f"{both} are the same policy, bit for bit, in {seeds}."
        case "one seed":
            return (
                f"One seed cannot show whether {pair.first} or {pair.second} is the better "
                f"algorithm (these two checkpoints differ by {_change(pair.mean or 0.0, pair.by)})."
            )
        case "two seeds":
            each = zip(pair.differences, pair.seeds, strict=True)
            by_seed = _listed([f"{_change(x, pair.by)} in seed {seed}" for x, seed in each])
            return (
                f"Too few seeds to rank {both}: {pair.first} - {pair.second} is "
                f"{by_seed}; run at least three seeds."
            )
        case "no difference" if pair.by == "reward":
            return f"{both} get the same rewards in {seeds}, with different weights."
        case "no difference":
            return f"{both} solve the same prompts in {seeds}, with different weights."
        case "cannot tell" if _leads(pair, tested):
            return _leading(pair, tested)
        case "cannot tell":
            return (
                f"No significant difference between {both} with this budget: {pair.first} - "
                f"{pair.second} is {_evidence(pair, tested)}. {_undecided(pair)}"
            )
        case _:
            return _better(pair, tested)


def _better(pair: PairResult, tested: int) -> str:
    new_prompts = pair.difference_new_prompts
    assert new_prompts is not None
    if pair.better == pair.second:
        new_prompts = _negated(new_prompts)
    text = f"{pair.better} is better than {_loser(pair)}: {_evidence(pair, tested)}."
    if new_prompts.low <= 0.0:
        text += (
            " This holds for these held-out prompts; for other prompts of the same kind the "
            f"interval is {points(new_prompts.low, pair.by)} to "
            f"{points(new_prompts.high, pair.by)}."
        )
    return text


def _leads(pair: PairResult, tested: int) -> bool:
    """Return whether only runs unlike all seeds could make the means of an undecided pair equal."""
    return pair.p_student is not None and pair.p_student * tested < LEVEL


def _leading(pair: PairResult, tested: int) -> str:
    assert pair.cancelling_share is not None
    first, second = pair.first, pair.second
    if (pair.mean or 0.0) < 0:
        first, second = second, first
    seeds = len(pair.seeds)
    missed = (1 - pair.cancelling_share) ** seeds
    wins = sum(difference * (pair.mean or 0.0) > 0 for difference in pair.differences)
    lowest, highest = ("0%", "100%") if pair.by == "success" else ("the lowest", "the highest")
    return (
        f"{first} leads {second}, but {seeds} seeds cannot show that it is better on average: "
        f"{_evidence(pair, tested)}. It is ahead in {wins} of {seeds} seeds; if {first} ended at "
        f"{lowest} or {second} at {highest} in {pair.cancelling_share:.0%} of all runs, the means "
        f"could be equal, and {seeds} seeds miss such runs with a probability of {missed:.0%}. "
        f"{_undecided(pair)}"
    )


def _evidence(pair: PairResult, tested: int) -> str:
    difference = pair.difference
    assert difference is not None
    assert pair.p_corrected is not None
    named = pair.decision == "better" or _leads(pair, tested)
    if named and difference.value < 0:
        difference = _negated(difference)
    low, high = points(difference.low, pair.by), points(difference.high, pair.by)
    p = f"p = {pair.p_corrected:.3f}" if pair.p_corrected >= 0.001 else "p < 0.001"
    several = tested > 1
    return (
        f"{_change(difference.value, pair.by)}, {'simultaneous ' * several}95 % interval {low} to "
        f"{high}, over {len(pair.seeds)} seeds, {p}"
        f"{f' corrected for {tested} pairs' * several}"
    )


def _undecided(pair: PairResult) -> str:
    assert pair.detectable is not None
    seeds = len(pair.seeds)
    if pair.seeds_needed is None:
        text = f"More than {MOST_SEEDS} seeds per arm would be needed to detect it; "
    else:
        text = (
            f"About {pair.seeds_needed} seeds per arm would be needed if the difference and the "
            "deviation are as observed; "
        )
    if pair.by == "success" and pair.detectable >= 1:
        return text + f"{seeds} seeds detect no difference with 80 % power."
    return (
        text + f"{seeds} seeds detect a difference of {_change(pair.detectable, pair.by)} or more "
        "with at least 80 % power (90 % confidence)."
    )


def _checkpoint_summary(pair: PairResult) -> str:
    if not pair.checkpoints:
        return ""
    sides: dict[str, list[str]] = {pair.first: [], pair.second: [], "": []}
    for one in pair.checkpoints:
        side = pair.first if one.gained > one.lost else pair.second
        sides[side if one.p_holm < LEVEL else ""].append(str(one.seed))
    parts = [
        f"{arm}'s is better in seed {_listed(sides[arm])}"
        for arm in (pair.first, pair.second)
        if sides[arm]
    ]
    if sides[""]:
        parts.append(f"undecided in seed {_listed(sides[''])}")
    return (
        f"Final checkpoints of {pair.first} and {pair.second}: {'; '.join(parts)} "
        f"({TESTS[pair.by]} over prompts, corrected). This is about these weights, not about "
        "the algorithms."
    )


def _cautions(
    arms: Sequence[ArmResult], pairs: Sequence[PairResult], as_if_untrained: Sequence[str]
) -> list[str]:
    found = []
    missing = [line for arm in arms for line in arm.missing]
    if missing:
        found.append(
            f"The comparison is incomplete: {'; '.join(missing)}. Pairs use the seeds that both "
            "arms finished. If runs failed because of their arm, the rest overrates that arm."
        )
        found += as_if_untrained
    if any(UNREADABLE in line for line in missing):
        found.append(
            "Evaluations of some runs are missing or damaged. To repeat such a run, delete its "
            "folder, and run the command again."
        )
    few = [pair for pair in pairs if pair.decision in ("one seed", "two seeds")]
    if few and len(few) < len(pairs):
        found.append(
            f"Some pairs share fewer than {FEW_SEEDS} seeds, which are too few to rank them."
        )
    if any(arm.by == "reward" for arm in arms):
        found.append(
            "No completion of any evaluation counts as correct, so the arms are compared by their "
            "mean reward. For accuracies, give the reward a success (success_at of a function), or "
            "evaluate with another reward (evaluate.reward)."
        )
    found += [text for arm in arms if (text := _at_constant(arm))]
    found += [
        f"{arm.arm} seed {one.seed} collapsed ({one.kind}): "
        f"from {value_text(arm.by, one.before)} to {value_text(arm.by, one.final)}."
        for arm in arms
        for one in arm.collapsed
    ]
    return found


def _at_constant(arm: ArmResult) -> str:
    above, answers = arm.above_constant, arm.distinct_answers
    if above is None or arm.final is None or arm.improvement is None:
        return ""
    if arm.improvement.value <= 0 or arm.final.low > arm.final.value - above:
        return ""
    distinct = "" if answers is None else f", with {answers:.3g} distinct answers"
    return (
        f"{arm.arm} ends {points(above)} points from the best constant "
        f"answer{distinct}: its interval includes what answering the same to every prompt gets."
    )


def points(share: float, by: Metric = "success") -> str:
    """Format a difference of accuracies in percentage points, or a difference of mean rewards.

    >>> points(-0.125), points(-0.125, "reward")
    ('-12.5', '-0.125')
    """
    text = f"{100 * share:+.1f}" if by == "success" else f"{share:+.3f}"
    return text[1:] if float(text) == 0 else text


def _change(value: float, by: Metric) -> str:
    return f"{points(value, by)} {UNITS[by]}"


def _negated(estimate: Estimate) -> Estimate:
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
