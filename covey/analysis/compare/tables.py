"""The verdict as tables of text, the same in every form of the report."""

from __future__ import annotations

from covey.analysis.compare.listings import NOTHING, TextTable
from covey.analysis.compare.verdict import ArmVerdict, PairVerdict, Reach, Verdict
from covey.evaluate.intervals import Estimate

RESULT_NOTE = (
    "Means over finished seeds. Improvement in points of accuracy, with its 95 % interval, which "
    "counts both seeds and problems."
)
COURSE_NOTE = (
    "Best: the mean of each seed's highest evaluation, which is too high because it was picked by "
    "the problems that measure it. Mean on the way: accuracy averaged over the budget. Collapsed: "
    "seeds that ended far below where they had been."
)
PAIR_NOTE = (
    "Points of accuracy at the end, over the seeds that both arms finished, with Student's 95 % "
    "interval over seeds; p of the paired t-test, by Holm's correction over all pairs."
)
CHECKPOINT_NOTE = (
    "This asks which of two sets of weights is better, not which algorithm: another seed may turn "
    "it round. p of McNemar's exact test, by Holm's correction over all pairs and seeds."
)


def result_table(found: Verdict) -> TextTable:
    """Return a row for each arm: where it began and where it ended."""
    return TextTable(
        title="Held-out accuracy before and after training",
        head=["method", "initial", "final", "improvement", "95 % interval", "seeds"],
        rows=[_result(arm) for arm in found.arms],
        note=RESULT_NOTE,
    )


def _result(arm: ArmVerdict) -> list[str]:
    change = arm.improvement
    return [
        arm.arm,
        _share(arm.initial),
        _share(arm.final),
        points(change.value) if change is not None else NOTHING,
        interval(change) if change is not None else NOTHING,
        str(arm.seeds),
    ]


def course_table(found: Verdict) -> TextTable:
    """Return how each arm got there: best, mean on the way, and how many seeds fell."""
    return TextTable(
        title="On the way",
        head=["method", "final, 95 % interval", "best", "mean on the way", "collapsed"],
        rows=[
            [
                arm.arm,
                NOTHING if arm.final is None else f"[{arm.final.low:.1%}, {arm.final.high:.1%}]",
                _share(arm.best),
                _share(arm.area),
                f"{len(arm.collapsed)} of {arm.seeds} seeds" if arm.collapsed else NOTHING,
            ]
            for arm in found.arms
        ],
        note=COURSE_NOTE,
    )


def reach_table(found: Verdict) -> TextTable:
    """Return how soon each arm reaches certain accuracies."""
    targets = [reach.accuracy for reach in next((a.reach for a in found.arms if a.reach), ())]
    rows = []
    for arm in found.arms:
        reached = {reach.accuracy: reach for reach in arm.reach}
        told = [_reach(reached.get(target)) if arm.seeds else NOTHING for target in targets]
        rows.append([arm.arm, *told])
    return TextTable(
        title="How soon an accuracy is reached",
        head=["method", *(f"{100 * target:.3g}%" for target in targets)],
        rows=rows if targets else [],
        note="Sampled tokens and seconds of training, medians over finished seeds.",
    )


def _reach(reach: Reach | None) -> str:
    if reach is None or reach.tokens is None or reach.seconds is None:
        return "not reached"
    return f"{reach.tokens:,.0f} tokens, {reach.seconds:,.0f} s"


def pair_words(found: Verdict) -> list[str]:
    """Return what can be said of each pair, in plain words, if the headline has not said it."""
    return [pair.words for pair in found.pairs if pair.words != found.headline]


def pair_table(found: Verdict) -> TextTable:
    """Return a row for each pair of arms."""
    return TextTable(
        title="Pair by pair",
        head=["first less second", "difference", "95 % interval", "p (Holm)", "seeds", "needed"],
        rows=[
            [f"{pair.first} - {pair.second}", *pair_cells(pair), str(len(pair.seeds)), needed(pair)]
            for pair in found.pairs
        ],
        note=f"{PAIR_NOTE} Needed: seeds for 80 % power, should the difference be what it looks.",
    )


def pair_cells(pair: PairVerdict, sign: int = 1) -> list[str]:
    """Return difference, interval and p of a pair, or of the pair turned round."""
    estimate = pair.difference
    if estimate is not None and sign < 0:
        estimate = Estimate(-estimate.value, -estimate.high, -estimate.low)
    return [
        NOTHING if pair.mean is None else points(sign * pair.mean),
        NOTHING if estimate is None else interval(estimate),
        NOTHING if pair.p_holm is None else p_value(pair.p_holm),
    ]


def needed(pair: PairVerdict) -> str:
    """Return how many seeds it would take to tell the two apart."""
    if pair.seeds_needed is not None:
        return str(pair.seeds_needed)
    return {"cannot tell": "too many", "one seed": "at least 2"}.get(pair.decision, NOTHING)


def matrix(found: Verdict) -> TextTable:
    """Return every arm against every other: difference, interval and p in a cell, by lines."""
    names = [arm.arm for arm in found.arms]
    cells = {(row, row): "" for row in names}
    for pair in found.pairs:
        for sign, place in ((1, (pair.first, pair.second)), (-1, (pair.second, pair.first))):
            difference, inside, p = pair_cells(pair, sign)
            known = [difference, *([inside, f"p {p}"] if pair.difference is not None else [])]
            cells[place] = "\n".join(known)
    return TextTable(
        title="Row less column",
        head=["", *names],
        rows=[[row, *(cells.get((row, column), NOTHING) for column in names)] for row in names],
        note=PAIR_NOTE,
    )


def checkpoint_table(found: Verdict) -> TextTable:
    """Return, for every pair and seed, how the two final checkpoints differ on the problems."""
    return TextTable(
        title="The checkpoints of each seed",
        head=["first, second", "seed", "difference", "95 % interval", "only 1st", "only 2nd", "p"],
        rows=[
            [
                f"{pair.first}, {pair.second}",
                str(seed.seed),
                points(seed.difference.value),
                interval(seed.difference),
                str(seed.gained),
                str(seed.lost),
                p_value(seed.p_holm),
            ]
            for pair in found.pairs
            for seed in pair.checkpoints
        ],
        note=CHECKPOINT_NOTE,
    )


def points(share: float) -> str:
    """Return a difference of accuracies in points.

    >>> points(-0.125)
    '-12.5'
    """
    return f"{100 * share + 0.0:+.1f}"


def interval(estimate: Estimate) -> str:
    """Return an interval in points."""
    return f"[{points(estimate.low)}, {points(estimate.high)}]"


def p_value(p: float) -> str:
    """Return a p-value with as many digits as mean something.

    >>> p_value(0.0000123), p_value(0.04321), p_value(1.0)
    ('< 0.001', '0.043', '1.000')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _share(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else f"{estimate.value:.1%}"
