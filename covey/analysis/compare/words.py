"""A verdict in plain words. Every sentence says which question it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from covey.analysis.compare.judged import ArmVerdict, PairVerdict
from covey.analysis.compare.statistics import LEVEL, MOST_SEEDS
from covey.evaluate.intervals import Estimate

FEW_SEEDS = 3


def headline(arms: Sequence[ArmVerdict], pairs: Sequence[PairVerdict]) -> str:
    """Say which algorithm is better, or why that cannot be said."""
    finished = [arm for arm in arms if arm.seeds]
    if not finished:
        return "No run has finished: there is nothing to compare."
    real = [pair for pair in pairs if pair.decision not in ("same policy", "nothing to compare")]
    if not real:
        return _without_question(finished, pairs)
    if all(pair.decision == "one seed" for pair in real):
        return (
            "One seed cannot say which algorithm is better: another seed might turn the order "
            "round. Only these checkpoints can be compared; run at least three seeds."
        )
    decided = [pair for pair in real if pair.better]
    if len(real) == 1:
        return real[0].words
    if not decided:
        return _none_decided(real)
    winner = _winner(finished, real)
    if winner:
        return f"{winner} is better than every other arm: {_wins(winner, real)}."
    found = ", ".join(f"{p.better} is better than {_other(p)}" for p in decided)
    rest = "; the other pairs cannot be told apart" if len(decided) < len(real) else ""
    return f"No arm is better than all others: {found}{rest}."


def _without_question(finished: Sequence[ArmVerdict], pairs: Sequence[PairVerdict]) -> str:
    same = [pair for pair in pairs if pair.decision == "same policy"]
    if same and len(same) == len(pairs):
        names = _listed([arm.arm for arm in finished])
        return f"{names} are the same policy, bit for bit, in every seed: there is no difference."
    if len(finished) == 1:
        return f"Only {finished[0].arm} has finished runs: there is nothing to compare it with."
    return "No two arms have finished the same seed: there is nothing to compare."


def _none_decided(real: Sequence[PairVerdict]) -> str:
    widest = max(real, key=lambda pair: abs(pair.mean or 0.0))
    tested = sum(pair.p_value is not None for pair in real)
    return (
        "The arms cannot be told apart with this budget. The largest difference is that of "
        f"{widest.first} and {widest.second}: {_how_far(widest, tested)}"
    )


def _winner(finished: Sequence[ArmVerdict], real: Sequence[PairVerdict]) -> str | None:
    for arm in finished:
        mine = [pair for pair in real if arm.arm in (pair.first, pair.second)]
        if len(mine) == len(finished) - 1 and all(pair.better == arm.arm for pair in mine):
            return arm.arm
    return None


def _wins(winner: str, real: Sequence[PairVerdict]) -> str:
    mine = (pair for pair in real if pair.better == winner)
    return ", ".join(f"{points(abs(p.mean or 0.0))} points over {_other(p)}" for p in mine)


def _other(pair: PairVerdict) -> str:
    return pair.second if pair.better == pair.first else pair.first


def of_pair(pair: PairVerdict, tested: int) -> str:
    """Say which of two algorithms is better."""
    both = f"{pair.first} and {pair.second}"
    if pair.decision == "nothing to compare":
        return f"{both} have no finished seed in common: there is nothing to compare."
    seeds = count(len(pair.seeds), "seed")
    if pair.decision == "same policy":
        return f"{both} are the same policy, bit for bit, in {seeds}."
    if pair.decision == "one seed":
        return (
            f"One seed cannot say whether {pair.first} or {pair.second} is the better algorithm "
            f"({points(pair.mean or 0.0)} points between these two checkpoints)."
        )
    if pair.decision == "no difference":
        return f"{both} are right and wrong on the same problems in {seeds}, by other weights."
    if pair.decision == "cannot tell":
        return f"{both} cannot be told apart with this budget: {_how_far(pair, tested)}"
    return _better(pair, tested)


def _better(pair: PairVerdict, tested: int) -> str:
    assert pair.difference is not None
    assert pair.other_problems is not None
    turned = pair.better == pair.second
    text = (
        f"{pair.better} is better than {_other(pair)}: "
        f"{_estimate(_turned(pair.difference, turned))} over {len(pair.seeds)} seeds, "
        f"{_p(pair, tested)}."
    )
    other = _turned(pair.other_problems, turned)
    if other.low <= 0.0:
        text += (
            " That holds for these problems; counting that others might have been asked, the "
            f"interval is {points(other.low)} to {points(other.high)}."
        )
    return text


def _how_far(pair: PairVerdict, tested: int) -> str:
    """Say what was seen, and what it would take to see more."""
    if pair.difference is None or pair.detectable is None:
        return f"{points(pair.mean or 0.0)} points."
    text = (
        f"{_estimate(pair.difference)} ({pair.first} less {pair.second}) over "
        f"{len(pair.seeds)} seeds, {_p(pair, tested)}. "
    )
    if pair.seeds_needed is None:
        text += f"So small a difference would take more than {MOST_SEEDS} seeds an arm to find; "
    else:
        text += (
            f"About {pair.seeds_needed} seeds an arm would be needed if the difference and the "
            "scatter are as seen; "
        )
    count = len(pair.seeds)
    if pair.detectable >= 1:
        return text + f"with these {count} not even the largest would be found 80 times in 100."
    return text + f"these {count} find one of {points(pair.detectable)} points 80 times in 100."


def _p(pair: PairVerdict, tested: int) -> str:
    value = pair.p_holm or 0.0
    shown = f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"
    return f"{shown} corrected for {tested} pairs" if tested > 1 else shown


def of_checkpoints(pair: PairVerdict) -> str:
    """Say in which seeds one of the two final checkpoints is better than the other."""
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
        f"Of the final checkpoints of {pair.first} and {pair.second}, {'; '.join(parts)} "
        "(McNemar's exact test over problems, corrected). That is about these weights, not about "
        "the algorithms."
    )


def cautions(
    arms: Sequence[ArmVerdict],
    pairs: Sequence[PairVerdict],
    as_if_untrained: Mapping[tuple[str, str], float],
) -> tuple[str, ...]:
    """Return what a reader must know before believing the headline."""
    found = _about_missing(arms, pairs, as_if_untrained)
    counts = [len(pair.seeds) for pair in pairs if pair.p_value is not None]
    if counts and min(counts) < FEW_SEEDS:
        found.append(
            "With two seeds the scatter between seeds is hardly known: a difference must be 13 "
            "times its standard error to count. Run three or more."
        )
    for arm in arms:
        found += [
            f"{arm.arm} seed {one.seed} collapsed ({one.kind}): from {one.before:.1%} to "
            f"{one.final:.1%}."
            for one in arm.collapsed
        ]
    return tuple(found)


def _about_missing(
    arms: Sequence[ArmVerdict],
    pairs: Sequence[PairVerdict],
    as_if_untrained: Mapping[tuple[str, str], float],
) -> list[str]:
    missing = [line for arm in arms for line in arm.missing]
    if not missing:
        return []
    text = (
        f"The comparison is incomplete: {'; '.join(missing)}. Pairs use the seeds that both "
        "finished. Runs may be missing because of their arm, and what is left then flatters it."
    )
    by_names = {(pair.first, pair.second): pair for pair in pairs}
    return [
        text,
        *(
            f"Counting failed runs as having learned nothing, {first} less {second} is "
            f"{points(value)} points instead of {points(by_names[first, second].mean or 0.0)}."
            for (first, second), value in as_if_untrained.items()
        ),
    ]


def points(share: float) -> str:
    """Return a difference of accuracies in points of a percent.

    >>> points(-0.125)
    '-12.5'
    """
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _estimate(estimate: Estimate) -> str:
    low, high = points(estimate.low), points(estimate.high)
    return f"{points(estimate.value)} points, 95 % interval {low} to {high}"


def _turned(estimate: Estimate, turned: bool) -> Estimate:
    if not turned:
        return estimate
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


def count(number: int, what: str) -> str:
    """Return a number of things in words.

    >>> count(1, "arm"), count(2, "arm")
    ('1 arm', '2 arms')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
