"""Writes the conclusion of a comparison: a headline, cautions and a sentence per pair of arms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from covey.errors import RunError
from covey.evaluation.intervals import Estimate
from covey.lab.compare.arm_results import UNREADABLE, ArmResult, arm_results
from covey.lab.compare.comparison import Comparison, Metric, RunResult
from covey.lab.compare.learning_curves import AXES
from covey.lab.compare.pair_results import PairResult, pair_results
from covey.lab.compare.statistics import FEW_SEEDS, LEVEL, MOST_SEEDS
from covey.records.metric_registry import value_text

UNITS: Mapping[Metric, str] = {"success": "points", "reward": "in mean reward"}
TESTS: Mapping[Metric, str] = {"success": "McNemar's exact test", "reward": "sign test"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The conclusion of a comparison: sentences for the report, and results of arms and pairs."""

    headline: str
    cautions: tuple[str, ...]
    """Reasons to trust the headline less, such as missing runs, few seeds or collapses."""
    complete: bool
    """Whether all planned runs have finished."""
    arms: tuple[ArmResult, ...]
    pairs: tuple[PairResult, ...]

    @property
    def by(self) -> Metric:
        """The metric that compares the arms."""
        return next((arm.by for arm in self.arms if arm.seeds), "success")


def conclude(comparison: Comparison) -> Conclusion:
    """Return the conclusion of a comparison, from its finished runs only."""
    runs = comparison.finished_runs()
    _check_same_prompts(run for mine in runs.values() for run in mine)
    arms = arm_results(comparison)
    pairs = pair_results(runs, {arm.arm: arm.missing for arm in arms})
    tested = sum(pair.p_value is not None for pair in pairs)
    pairs = tuple(
        replace(
            pair, summary=_pair_summary(pair, tested), checkpoint_summary=_checkpoint_summary(pair)
        )
        for pair in pairs
    )
    return Conclusion(
        headline=_headline(arms, pairs),
        cautions=(
            *_cautions(arms, pairs, _as_if_untrained(comparison, runs, pairs)),
            *_ended_early(comparison, runs),
        ),
        complete=not any(arm.missing for arm in arms),
        arms=arms,
        pairs=pairs,
    )


def _check_same_prompts(runs: Iterable[RunResult]) -> None:
    first: RunResult | None = None
    for run in runs:
        first = first or run
        for point in run.points:
            if list(point.correct) != list(first.points[0].correct):
                raise RunError(
                    f"arm {run.arm} with seed {run.seed} and arm {first.arm} with seed "
                    f"{first.seed} were evaluated on different prompts at step {point.step}; "
                    "delete one of these two runs, and repeat the command"
                )


def _ended_early(comparison: Comparison, runs: Mapping[str, Sequence[RunResult]]) -> Iterator[str]:
    """Yield a caution if runs ended before their budget, for example by train.stop_on."""
    used = AXES[comparison.budget][1]
    early = [
        f"{run.arm} seed {run.seed} at {used(run.points[-1]):,} {comparison.budget}"
        for mine in runs.values()
        for run in mine
        if used(run.points[-1]) < comparison.amount
    ]
    if early:
        yield (
            f"Not all runs have a last evaluation at their budget of {comparison.amount:,} "
            f"{comparison.budget}: {'; '.join(early)}."
        )


def _as_if_untrained(
    comparison: Comparison,
    runs: Mapping[str, Sequence[RunResult]],
    pairs: Sequence[PairResult],
) -> list[str]:
    """Return sentences with each pair's mean difference, computed as if failed runs were untrained.

    An untrained run has the accuracy of its arm before training. The mean difference shows how much
    failed runs could change the conclusion.
    """
    starts = {arm: mine[-1].points[0].value for arm, mine in runs.items() if mine}
    ends = {(run.arm, run.seed): run.points[-1].value for mine in runs.values() for run in mine}
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
    """Return a sentence that names the better algorithm, or says why none is known to be better."""
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
    untested = _untested(few)
    if len(tested) == 1:
        return tested[0].summary + untested
    decided = [pair for pair in tested if pair.better]
    if not decided:
        return (
            _none_decided(tested, "in the tested pairs" if few else "between the arms") + untested
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


def _untested(few: Sequence[PairResult]) -> str:
    """Return a sentence that names the pairs that share too few seeds for a test."""
    names = _listed([f"{pair.first} - {pair.second}" for pair in few])
    return f" Not tested, with fewer than {FEW_SEEDS} seeds in common: {names}." if few else ""


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


def _none_decided(tested: Sequence[PairResult], where: str) -> str:
    widest = max(tested, key=lambda pair: abs(pair.mean or 0.0))
    return (
        f"No significant difference {where} with this budget. The largest is between "
        f"{widest.first} and {widest.second}: {_change(widest.mean or 0.0, widest.by)}."
    )


def _loser(pair: PairResult) -> str:
    return pair.second if pair.better == pair.first else pair.first


def _pair_summary(pair: PairResult, tested: int) -> str:
    """Return a sentence that names the better algorithm of a pair, or says that none is better."""
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
    """Say what would make the means of a pair equal, although its seeds agree."""
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
    """Return the difference in the direction that the sentence names, its interval and its p."""
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
    """Return how many seeds the observed difference needs, and what these seeds can detect."""
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
    """Return a sentence that names the better final checkpoint for each seed."""
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
) -> tuple[str, ...]:
    """Return the reasons to trust the headline less, as sentences."""
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
    return tuple(found)


def _at_constant(arm: ArmResult) -> str:
    """Return a caution if an arm improved, but does not clearly beat one constant answer."""
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
    """Turn the estimate of `A - B` into the estimate of `B - A`."""
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 arm` or `2 arms`.

    >>> count(1, "arm"), count(2, "arm")
    ('1 arm', '2 arms')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
