"""On which held-out problems arms agree, and on which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.analysis.compare.outcome import Comparison, Outcome

MOST_DIFFERENT = 12
"""Problems listed as those on which arms differ most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One held-out problem: how many finished runs of each arm solve it at the end."""

    id: str
    solved: Mapping[str, int]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {"id": self.id, "solved": dict(self.solved)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All held-out problems. An arm solves one if more than half of its finished runs do."""

    runs: Mapping[str, int]
    """Finished runs of each arm that has any; the others belong to nothing here."""
    problems: int
    by_all: int
    by_none: int
    only: Mapping[str, int]
    """Problems that this arm alone solves."""
    between_seeds: float | None
    """Share of problems on which two runs of one arm differ. None without two such runs."""
    between_arms: float | None
    """Share of problems on which two arms differ with the same seed."""
    most_different: tuple[Problem, ...]

    @property
    def by_some(self) -> int:
        """Problems that several arms solve, but not all."""
        return self.problems - self.by_all - self.by_none - sum(self.only.values())

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "runs": dict(self.runs),
            "problems": self.problems,
            "solved_by_all": self.by_all,
            "solved_by_none": self.by_none,
            "solved_by_some": self.by_some,
            "solved_only_by": dict(self.only),
            "disagreement_between_seeds": self.between_seeds,
            "disagreement_between_arms": self.between_arms,
            "most_different": [problem.row() for problem in self.most_different],
        }


def agreement(comparison: Comparison) -> Agreement | None:
    """Count over the last evaluations of finished runs; None if there are none."""
    runs = {arm.name: finished(comparison.of(arm.name)) for arm in comparison.arms}
    runs = {arm: mine for arm, mine in runs.items() if mine}
    if not runs:
        return None
    first = next(iter(runs.values()))[0].points[-1].right
    problems = [Problem(id=name, solved=_solved(runs, name)) for name in first]
    solvers = [_solvers(problem, runs) for problem in problems]
    alone = [next(iter(arms)) for arms in solvers if len(arms) == 1 < len(runs)]
    return Agreement(
        runs={arm: len(mine) for arm, mine in runs.items()},
        problems=len(problems),
        by_all=sum(len(arms) == len(runs) for arms in solvers),
        by_none=sum(not arms for arms in solvers),
        only={arm: alone.count(arm) for arm in runs} if len(runs) > 1 else {},
        between_seeds=_disagreement(
            pair for mine in runs.values() for pair in itertools.combinations(mine, 2)
        ),
        between_arms=_disagreement(
            (a, b)
            for one, other in itertools.combinations(runs.values(), 2)
            for a, b in itertools.product(one, other)
            if a.seed == b.seed
        ),
        most_different=_most_different(problems, runs),
    )


def finished(runs: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Return the runs that came to their end and were evaluated there."""
    return tuple(run for run in runs if run.state == "done" and run.points)


def _solved(runs: Mapping[str, Sequence[Outcome]], problem: str) -> dict[str, int]:
    return {arm: sum(run.points[-1].right[problem] for run in mine) for arm, mine in runs.items()}


def _solvers(problem: Problem, runs: Mapping[str, Sequence[Outcome]]) -> set[str]:
    return {arm for arm, count in problem.solved.items() if 2 * count > len(runs[arm])}


def _disagreement(pairs: Iterable[tuple[Outcome, Outcome]]) -> float | None:
    shares = []
    for one, other in pairs:
        a, b = one.points[-1].right, other.points[-1].right
        shares.append(sum(a[name] != b[name] for name in a) / len(a))
    return sum(shares) / len(shares) if shares else None


def _most_different(
    problems: Sequence[Problem], runs: Mapping[str, Sequence[Outcome]]
) -> tuple[Problem, ...]:
    """Return the problems with the largest gap between two arms' shares of solving runs."""

    def gap(problem: Problem) -> float:
        shares = [problem.solved[arm] / len(mine) for arm, mine in runs.items()]
        return max(shares) - min(shares)

    ordered = sorted(problems, key=gap, reverse=True)  # stable: ties stay in the order asked
    return tuple(problem for problem in ordered[:MOST_DIFFERENT] if gap(problem) > 0)
