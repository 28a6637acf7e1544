"""The results of each arm of a comparison: accuracy, training cost and collapsed seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from covey.evaluation.intervals import Estimate, likely_bounds
from covey.evaluation.items import is_graded
from covey.lab.compare import statistics
from covey.lab.compare.comparison import Comparison, Metric, Point, RunResult
from covey.lab.compare.statistics import Array

# Learning curves: held-out accuracy during training.


AXES: Mapping[str, tuple[str, Callable[[Point], float]]] = MappingProxyType(
    {
        "steps": ("training steps", lambda point: point.step),
        "tokens": ("tokens sampled for training", lambda point: point.tokens),
        "updates": ("optimizer steps", lambda point: point.updates),
        "seconds": ("seconds of training", lambda point: point.seconds),
    }
)
"""Maps each x axis to its label, and to a function that returns the x value of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The learning curve of one run: the x value and the accuracy of each evaluation."""

    seed: int
    state: str
    x: Mapping[str, tuple[float, ...]]
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The learning curves of an arm's runs, and the mean of its finished runs."""

    arm: str
    lines: tuple[Line, ...]
    x: Mapping[str, tuple[float, ...]]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """The lowest accuracy of any finished run."""
    high: tuple[float, ...]
    seeds: Mapping[int, tuple[float | None, ...]]
    """Maps each seed to its accuracies at the steps of the mean curve. An accuracy is None if the
    run was not evaluated at the step."""


def learning_curve(comparison: Comparison, arm: str) -> Curve:
    runs = [run for run in comparison.runs_of(arm) if run.points]
    columns = _columns([run for run in runs if run.finished])
    values = [[point.value for point in column] for column in columns]
    seeds = {}
    for run in runs if columns else ():
        by_step = {point.step: point.value for point in run.points}
        earlier = (by_step.get(column[0].step) for column in columns[:-1])
        seeds[run.seed] = (*earlier, run.points[-1].value if run.finished else None)
    return Curve(
        arm=arm,
        lines=tuple(
            Line(
                seed=run.seed,
                state=run.state,
                x={axis: tuple(map(of, run.points)) for axis, (_, of) in AXES.items()},
                accuracy=tuple(point.value for point in run.points),
            )
            for run in runs
        ),
        x={
            axis: tuple(_mean([of(point) for point in column]) for column in columns)
            for axis, (_, of) in AXES.items()
        },
        mean=tuple(_mean(column) for column in values),
        low=tuple(min(column) for column in values),
        high=tuple(max(column) for column in values),
        seeds=seeds,
    )


def _columns(runs: Sequence[RunResult]) -> list[list[Point]]:
    """Return, for each step of the mean curve, the evaluations that the curve averages.

    The mean curve has the steps at which all runs were evaluated. The last value of the mean curve
    averages the last evaluation of each run, because runs with a token budget end at different
    steps.
    """
    if not runs:
        return []
    by_step = [{point.step: point for point in run.points} for run in runs]
    shared = set(by_step[0]).intersection(*by_step[1:])
    ends = [run.points[-1] for run in runs]
    earlier = sorted(step for step in shared if all(step < end.step for end in ends))
    return [*([run[step] for run in by_step] for step in earlier), ends]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


UNREADABLE = "without a readable evaluation of"

SHARES = (0.5, 1.0)
"""Fractions of the accuracy gain for which the report shows each arm's training cost. The full
accuracy gain goes from the initial accuracy to the highest accuracy that every arm reaches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToAccuracy:
    """The median cost of training an arm up to a given accuracy.

    A cost is None if at least half of the seeds never reach the accuracy.
    """

    accuracy: float
    reached: int
    budget: float | None
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The time and memory of an arm's runs.

    A field is None if the runs did not record the value.
    """

    seconds: float
    cpu_seconds: float | None
    memory_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """A seed whose final accuracy is significantly lower than an earlier accuracy."""

    seed: int
    before: float
    final: float
    kind: Literal["lost half of its best", "below its start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The mean reward, or the mean of one reward component, before and after training."""

    initial: Estimate
    final: Estimate
    improvement: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """The results of one arm of a comparison, over the seeds that have finished.

    The estimates are accuracies if `by` is "success" and mean rewards if `by` is "reward". The
    estimates are None if no seed has finished.
    """

    arm: str
    seeds: int
    missing: tuple[str, ...]
    initial: Estimate | None = None
    final: Estimate | None = None
    improvement: Estimate | None = None
    best: Estimate | None = None
    area: Estimate | None = None
    """The mean accuracy over training, from the start up to the largest budget that every run
    reached. The confidence interval covers the variation between seeds and between prompts."""
    time_to_accuracy: tuple[TimeToAccuracy, ...] = ()
    collapsed: tuple[Collapse, ...] = ()
    by: Metric = "success"
    finals: tuple[float, ...] = ()
    improvements: tuple[float, ...] = ()
    distinct_answers: float | None = None
    """The number of different final answers in the last evaluation, averaged over seeds."""
    above_constant: float | None = None
    rewards: Mapping[str, RewardResult] = field(default_factory=dict)
    """Maps `reward` to the mean reward of greedy completions, and `parts/NAME` to the mean of each
    reward component. `rewards` is empty if every reward is 1 for success and 0 for failure.
    """
    cost: Cost | None = None


def arm_results(comparison: Comparison) -> tuple[ArmResult, ...]:
    arms = comparison.finished_runs()
    budget = comparison.budget
    levels = _levels([runs for runs in arms.values() if runs])
    end = min((_axis(run, budget)[-1] for runs in arms.values() for run in runs), default=0.0)
    results = []
    for arm, runs in arms.items():
        missing = _missing(comparison, arm)
        if not runs:
            results.append(ArmResult(arm=arm, seeds=0, missing=missing))
            continue
        by = runs[0].points[-1].by
        estimate = statistics.accuracy if by == "success" else statistics.mean_reward
        first, last = (_by_prompt([run.points[at] for run in runs]) for at in (0, -1))
        best = _by_prompt([max(run.points, key=lambda point: point.value) for run in runs])
        areas = [statistics.area(_axis(run, budget), _by_prompt(run.points).T, end) for run in runs]
        collapses = (_collapse(run) for run in runs)
        answers = [n for run in runs if (n := run.points[-1].distinct_answers) is not None]
        constant = comparison.best_constant if by == "success" else None
        cpu = [run.cpu_seconds for run in runs if run.cpu_seconds]
        memory = [run.memory_gib for run in runs if run.memory_gib]
        results.append(
            ArmResult(
                arm=arm,
                seeds=len(runs),
                missing=missing,
                initial=estimate(first),
                final=estimate(last),
                improvement=statistics.change(last - first, _span(first, last)),
                best=estimate(best),
                area=estimate(np.array(areas)),
                time_to_accuracy=tuple(_time_to(level, runs, budget) for level in levels),
                by=by,
                finals=tuple(last.mean(axis=1).tolist()),
                improvements=tuple((last - first).mean(axis=1).tolist()),
                distinct_answers=sum(answers) / len(answers) if answers else None,
                above_constant=None if constant is None else float(last.mean()) - constant,
                rewards=_rewards(runs),
                collapsed=tuple(each for each in collapses if each is not None),
                cost=Cost(
                    seconds=float(np.median([run.points[-1].seconds for run in runs])),
                    cpu_seconds=float(np.median(cpu)) if cpu else None,
                    memory_gib=max(memory, default=None),
                ),
            )
        )
    return tuple(results)


def _missing(comparison: Comparison, arm: str) -> tuple[str, ...]:
    by_seed = {run.seed: run for run in comparison.runs_of(arm)}
    lines = []
    for seed in sorted({*comparison.seeds, *by_seed}):
        run = by_seed.get(seed)
        if run is None:
            lines.append(f"{arm} seed {seed}: not run")
        elif run.state != "done":
            lines.append(f"{arm} seed {seed}: {run.state}{run.error and f', {run.error}'}")
        elif not run.points and not run.unreadable:
            lines.append(f"{arm} seed {seed}: done, but never evaluated")
        elif not run.finished:
            steps = ", ".join(map(str, run.unreadable))
            lines.append(f"{arm} seed {seed}: done, but {UNREADABLE} step {steps}")
    return tuple(lines)


def _by_prompt(points: Sequence[Point]) -> Array:
    return np.array([point.values for point in points], dtype=float)


def _span(first: Array, last: Array) -> float:
    """Return the largest possible difference between two values: 1 for accuracies."""
    low, high = likely_bounds([first, last])
    return high - low


def _values(run: RunResult) -> list[float]:
    return [point.value for point in run.points]


def _rewards(runs: Sequence[RunResult]) -> dict[str, RewardResult]:
    ends = [(run.points[0], run.points[-1]) for run in runs]
    scored = [
        (row, point.correct[prompt])
        for pair in ends
        for point in pair
        for prompt, row in point.rewards.items()
    ]
    names = list(dict.fromkeys(name for row, _ in scored for name in row))
    if not is_graded((row["reward"], success) for row, success in scored):
        return {}
    found = {}
    for name in names:
        prompts = [
            prompt
            for prompt in ends[0][0].correct
            if all(name in point.rewards.get(prompt, {}) for pair in ends for point in pair)
        ]
        if prompts:
            first, last = (
                np.array([[pair[at].rewards[prompt][name] for prompt in prompts] for pair in ends])
                for at in (0, 1)
            )
            found[name] = RewardResult(
                initial=statistics.mean_reward(first),
                final=statistics.mean_reward(last),
                improvement=statistics.change(last - first, _span(first, last)),
            )
    return found


def _axis(run: RunResult, name: str) -> list[float]:
    return [AXES[name][1](point) for point in run.points]


def _levels(arms: Sequence[Sequence[RunResult]]) -> list[float]:
    """Return the accuracy levels at which the report compares the speed of arms.

    More than half of each arm's seeds reach the highest accuracy level, so that a single seed that
    fails to learn does not lower the accuracy levels.
    """
    if not arms:
        return []
    heights = [sorted((max(_values(run)) for run in runs), reverse=True) for runs in arms]
    common = min(height[len(height) // 2] for height in heights)
    start = float(np.mean([run.points[0].value for runs in arms for run in runs]))
    if common <= start:
        return []
    return [start + share * (common - start) for share in SHARES]


def _time_to(level: float, runs: Sequence[RunResult], budget: str) -> TimeToAccuracy:
    places = {
        name: [statistics.reached(_axis(run, name), _values(run), level) for run in runs]
        for name in (budget, "tokens", "seconds")
    }

    def median(name: str) -> float | None:
        middle = float(np.median(places[name]))
        return middle if math.isfinite(middle) else None

    return TimeToAccuracy(
        accuracy=level,
        reached=sum(math.isfinite(place) for place in places[budget]),
        budget=median(budget),
        tokens=median("tokens"),
        seconds=median("seconds"),
    )


def _collapse(run: RunResult) -> Collapse | None:
    """Return the collapse of a run, or None if it did not collapse (see docs/statistics.md).

    A run has collapsed if its final accuracy is significantly below its initial accuracy. A run has
    also collapsed if its final accuracy is less than half of its best accuracy, and the drop from
    the best accuracy is significant.
    """
    best = max(run.points, key=lambda point: point.value)
    start, last = run.points[0], run.points[-1]
    final = _by_prompt([last])[0]
    halved = last.by == "success" and 2 * last.value < best.value  # rewards have no natural zero
    if halved and statistics.fell(_by_prompt([best])[0], final):
        kind: Literal["lost half of its best", "below its start"] = "lost half of its best"
        before = best.value
    elif last.value < start.value and statistics.fell(_by_prompt([start])[0], final):
        kind, before = "below its start", start.value
    else:
        return None
    return Collapse(seed=run.seed, before=before, final=last.value, kind=kind)


# Agreement of arms: how many held-out prompts all arms, only one arm or no arm solves.

MOST_DIFFERENT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPrompt:
    """A held-out prompt, and for each arm the number of finished runs that solve the prompt."""

    id: str
    solved: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The numbers of held-out prompts that all arms, some arms or no arm solves.

    An arm solves a prompt if more than half of the arm's finished runs solve the prompt.
    """

    runs: Mapping[str, int]
    num_prompts: int
    solved_by_all: int
    solved_by_none: int
    solved_by_some: int
    solved_only_by: Mapping[str, int]
    disagreement_between_seeds: float | None
    disagreement_between_arms: float | None
    most_different: tuple[SolvedPrompt, ...]


def prompt_agreement(comparison: Comparison) -> Agreement | None:
    runs = {arm: mine for arm, mine in comparison.finished_runs().items() if mine}
    if not runs:
        return None
    correct = {arm: [run.points[-1].correct for run in mine] for arm, mine in runs.items()}
    prompts = [
        SolvedPrompt(id=name, solved={arm: sum(c[name] for c in correct[arm]) for arm in runs})
        for name in next(iter(correct.values()))[0]
    ]
    solvers = [{arm for arm, n in p.solved.items() if 2 * n > len(runs[arm])} for p in prompts]
    alone = [next(iter(arms)) for arms in solvers if len(arms) == 1 < len(runs)]
    by_all = sum(len(arms) == len(runs) for arms in solvers)
    by_none = sum(not arms for arms in solvers)

    def gap(prompt: SolvedPrompt) -> float:
        shares = [prompt.solved[arm] / len(mine) for arm, mine in runs.items()]
        return max(shares) - min(shares)

    return Agreement(
        runs={arm: len(mine) for arm, mine in runs.items()},
        num_prompts=len(prompts),
        solved_by_all=by_all,
        solved_by_none=by_none,
        solved_by_some=len(prompts) - by_all - by_none - len(alone),
        solved_only_by={arm: alone.count(arm) for arm in runs} if len(runs) > 1 else {},
        disagreement_between_seeds=_disagreement(
            pair for mine in runs.values() for pair in itertools.combinations(mine, 2)
        ),
        disagreement_between_arms=_disagreement(
            (a, b)
            for one, other in itertools.combinations(runs.values(), 2)
            for a, b in itertools.product(one, other)
            if a.seed == b.seed
        ),
        # The sort is stable, so ties keep the order of the task.
        most_different=tuple(
            prompt
            for prompt in sorted(prompts, key=gap, reverse=True)[:MOST_DIFFERENT]
            if gap(prompt) > 0
        ),
    )


def _disagreement(pairs: Iterable[tuple[RunResult, RunResult]]) -> float | None:
    shares = []
    for one, other in pairs:
        a, b = one.points[-1].correct, other.points[-1].correct
        shares.append(sum(a[name] != b[name] for name in a) / len(a))
    return sum(shares) / len(shares) if shares else None
