"""Tables of what was compared and on what: differences, runs, problems. As text, for every form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from covey.analysis.compare.agreement import Agreement
from covey.analysis.compare.outcome import Comparison, Outcome

NOTHING = "-"
NO_OPTION = "(it has no such option)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table whose cells are text; its first column names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def differences_table(comparison: Comparison) -> TextTable:
    """Return what each arm has that the common configuration has not."""
    rows = [
        [arm.name, setting, NO_OPTION if value is None else json.dumps(value, default=str)]
        for arm in comparison.arms
        for setting, value in arm.differences.items()
    ]
    rows += [[arm.name, NOTHING, NOTHING] for arm in comparison.arms if not arm.differences]
    order = [arm.name for arm in comparison.arms]
    return TextTable(
        title="What differs between arms",
        head=["arm", "setting", "value"],
        rows=sorted(rows, key=lambda row: order.index(row[0])),
        note="All other settings are those of the common configuration.",
    )


def finding_title(row: Mapping[str, str]) -> str:
    """Return what a finding is, and which arms it is about."""
    arms = f" ({row['arms']})" if row.get("arms") else ""
    return f"{row.get('title', '')}{arms}"


def runs_table(comparison: Comparison) -> TextTable:
    """Return every run, those that failed with their error."""
    return TextTable(
        title="Runs",
        head=["arm", "seed", "state", "steps", "tokens", "seconds", "weights", "error"],
        rows=[_run(run) for arm in comparison.arms for run in comparison.of(arm.name)],
        note=f"Runs with equal weights are the same policy, bit for bit. {_shared(comparison)}",
    )


def _shared(comparison: Comparison) -> str:
    """Say whether the arms of a seed learned from the same answers in their first step."""
    names: dict[int, set[str]] = {}
    for run in comparison.outcomes:
        if run.first_answers:
            names.setdefault(run.seed, set()).add(run.first_answers)
    apart = [str(seed) for seed, found in sorted(names.items()) if len(found) > 1]
    if not names:
        return ""
    if not apart:
        return "All arms of a seed learned from the same answers in the first step."
    return (
        f"Not all arms learned from the same answers in the first step (seed {', '.join(apart)}): "
        "they sample differently, or have other seeds."
    )


def _run(run: Outcome) -> list[str]:
    end = [NOTHING] * 3
    if run.points:
        last = run.points[-1]
        end = [f"{last.step:,}", f"{last.tokens:,}", f"{last.seconds:,.0f}"]
    told = [run.weights[:12] or NOTHING, run.error or NOTHING]
    return [run.arm, str(run.seed), run.state, *end, *told]


def solved_table(found: Agreement) -> TextTable:
    """Return how many problems every arm solves, none, or one alone."""
    counts = {
        "every arm": found.by_all,
        "no arm": found.by_none,
        **{f"only {arm}": count for arm, count in found.only.items()},
    }
    if len(found.runs) > 2:
        counts["several arms, not all"] = found.by_some
    return TextTable(
        title=f"The {found.problems} held-out problems at the end of training",
        head=["solved by", "problems", "share"],
        rows=[[name, str(n), f"{n / found.problems:.1%}"] for name, n in counts.items()],
        note="An arm solves a problem if more than half of its finished seeds do. "
        + _disagreement(found),
    )


def _disagreement(found: Agreement) -> str:
    """Set the difference between arms beside that between seeds of one arm."""
    if found.between_arms is None:
        return "There are no two arms with a finished run of the same seed."
    arms = f"Two arms with the same seed disagree on {found.between_arms:.1%} of the problems"
    if found.between_seeds is None:
        return f"{arms}; how much of that is chance, one seed cannot tell."
    return f"{arms}, two seeds of the same arm on {found.between_seeds:.1%}."


def contested_table(found: Agreement, texts: Mapping[str, tuple[str, str]]) -> TextTable:
    """Return the problems on which arms differ most, with their texts where they are known."""
    return TextTable(
        title="Problems on which arms differ most",
        head=["problem", "expected", *found.runs],
        rows=[
            [
                *texts.get(problem.id, (problem.id, NOTHING)),
                *(f"{problem.solved[arm]} of {count}" for arm, count in found.runs.items()),
            ]
            for problem in found.most_different
        ],
        note="How many of an arm's finished seeds solve it.",
    )
