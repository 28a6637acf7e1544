"""Agreement of arms: how many held-out prompts all arms, only one arm or no arm solves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from covey.analysis.compare.comparison import Comparison, RunResult

MOST_DIFFERENT = 12
"""The number of prompts in the list of prompts on which arms differ most."""

Runs = Mapping[str, Sequence[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPrompt:
    """A held-out prompt, and the number of finished runs of each arm that solve it."""

    id: str
    solved: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Numbers of held-out prompts that all arms, some arms or no arm solves.

    An arm solves a prompt if more than half of its finished runs solve it.
    """

    runs: Mapping[str, int]
    """Arm -> number of finished runs; arms without a finished run are left out."""
    num_prompts: int
    solved_by_all: int
    solved_by_none: int
    solved_by_some: int
    """The number of prompts solved by several arms, but not by all."""
    solved_only_by: Mapping[str, int]
    disagreement_between_seeds: float | None
    """The mean fraction of prompts that only one of two runs of the same arm solves. The value is
    None if no arm has two finished runs.
    """
    disagreement_between_arms: float | None
    """The mean fraction of prompts that only one of two runs solves, for runs of different arms
    with the same seed.
    """
    most_different: tuple[SolvedPrompt, ...]


def prompt_agreement(comparison: Comparison) -> Agreement | None:
    """Count the prompts that arms solve in their last evaluation; None if no run has finished."""
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
        most_different=_most_different(prompts, runs),
    )


def _disagreement(pairs: Iterable[tuple[RunResult, RunResult]]) -> float | None:
    shares = []
    for one, other in pairs:
        a, b = one.points[-1].correct, other.points[-1].correct
        shares.append(sum(a[name] != b[name] for name in a) / len(a))
    return sum(shares) / len(shares) if shares else None


def _most_different(prompts: Sequence[SolvedPrompt], runs: Runs) -> tuple[SolvedPrompt, ...]:
    """Return the prompts whose success rates differ most between arms."""

    def gap(prompt: SolvedPrompt) -> float:
        shares = [prompt.solved[arm] / len(mine) for arm, mine in runs.items()]
        return max(shares) - min(shares)

    ordered = sorted(prompts, key=gap, reverse=True)  # stable: ties keep the order of the task
    return tuple(prompt for prompt in ordered[:MOST_DIFFERENT] if gap(prompt) > 0)
