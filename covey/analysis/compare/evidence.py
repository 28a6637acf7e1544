"""What a report shows beside its numbers, read from the run folders: answers and training health.

Nothing here is needed for a verdict: a folder without these files still gets its report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from covey.analysis.compare.agreement import finished
from covey.analysis.compare.outcome import Comparison, Outcome
from covey.run.folder import RunFolder

HEALTH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reward": ("objective/scores",),
        "entropy": ("policy/entropy_avg",),
        "clipped share": ("policy/clipfrac_avg",),
        # Against the reference where there is one, else against the policy that sampled.
        "KL": ("objective/kl_avg", "policy/approxkl_avg"),
        "answer length": ("rollout/lengths",),
        "gradient norm": ("optim/grad_norm",),
    }
)
"""Panel of training health -> the metrics of steps.jsonl that it may show, the first that is there.

docs/metrics.md says what each means.
"""
HEALTH_POINTS = 200
"""A panel is small: longer runs are averaged over so many stretches."""
SIDE_BY_SIDE = MappingProxyType({"arms differ": 3, "all right": 1, "all wrong": 2})
"""How many problems of each kind are shown with every arm's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One held-out problem with the greedy answer of every arm, at the end of training."""

    kind: str
    prompt_id: str
    prompt: str
    expected: str
    answers: Mapping[str, Mapping[str, Any]]
    """Arm -> `text`, `right`, `tokens`, `finish`."""

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind,
            "prompt_id": self.prompt_id,
            "prompt": self.prompt,
            "expected": self.expected,
            "answers": {arm: dict(answer) for arm, answer in self.answers.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A metric of an arm over training steps: the mean over its runs."""

    metric: str
    arm: str
    steps: tuple[float, ...]
    values: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        steps, values = list(self.steps), list(self.values)
        return {"metric": self.metric, "arm": self.arm, "steps": steps, "values": values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Answers and training curves."""

    texts: Mapping[str, tuple[str, str]]
    """Prompt id -> the prompt and the expected answer. Empty if no run kept its answers."""
    seed: int | None
    """Whose answers stand side by side."""
    side_by_side: tuple[Answered, ...]
    health: Mapping[str, tuple[Trend, ...]]
    """By panel."""


def gather(folder: Path, comparison: Comparison) -> Evidence:
    """Read what the runs of a comparison left on disk."""
    seed = _common_seed(comparison)
    runs = finished(run for run in comparison.outcomes if run.seed == seed)
    order = [arm.name for arm in comparison.arms]
    runs = tuple(sorted(runs, key=lambda run: order.index(run.arm)))
    rows = {run.arm: _last_answers(folder, run) for run in runs}
    rows = {arm: answers for arm, answers in rows.items() if answers}
    texts = {i: (r["prompt"], r["target"]) for a in rows.values() for i, r in a.items()}
    return Evidence(
        texts=texts,
        seed=seed if rows else None,
        side_by_side=side_by_side(rows),
        health=_health(folder, comparison),
    )


def _common_seed(comparison: Comparison) -> int | None:
    """Return the seed that most arms finished; of several the first."""
    counts = {
        seed: len(finished(run for run in comparison.outcomes if run.seed == seed))
        for seed in comparison.seeds
    }
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _last_answers(folder: Path, run: Outcome) -> dict[str, dict[str, Any]]:
    rows = RunFolder(folder / run.folder).items(run.points[-1].step, note=_ignore)
    return {row["prompt_id"]: row for row in rows}


def _ignore(text: str) -> None:
    """What is damaged was told when the outcomes were read."""


def side_by_side(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[Answered, ...]:
    """Pick problems that show what arms do: those on which they differ, all right, all wrong.

    `rows` holds, by arm and by prompt id, lines of the last evaluation of one seed.
    """
    if not rows:
        return ()
    left = dict(SIDE_BY_SIDE)
    chosen = []
    for prompt_id, first in next(iter(rows.values())).items():
        mine = {arm: answers[prompt_id] for arm, answers in rows.items() if prompt_id in answers}
        kind = _kind([bool(row["success"]) for row in mine.values()])
        if left[kind] > 0:
            left[kind] -= 1
            chosen.append(
                Answered(
                    kind=kind,
                    prompt_id=prompt_id,
                    prompt=first["prompt"],
                    expected=first["target"],
                    answers={arm: _answer(row) for arm, row in mine.items()},
                )
            )
    order = list(SIDE_BY_SIDE)
    return tuple(sorted(chosen, key=lambda answered: order.index(answered.kind)))


def _kind(right: Sequence[bool]) -> str:
    if all(right):
        return "all right"
    return "arms differ" if any(right) else "all wrong"


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": row["completion"],
        "right": row["success"],
        "tokens": row["tokens"],
        "finish": row["finish"],
    }


def _health(folder: Path, comparison: Comparison) -> dict[str, tuple[Trend, ...]]:
    found: dict[str, list[Trend]] = {}
    for arm in comparison.arms:
        logs = [RunFolder(folder / run.folder).steps(_ignore) for run in comparison.of(arm.name)]
        for panel, metrics in HEALTH.items():
            trends = (trend(arm.name, metric, logs) for metric in metrics)
            drawn = next((each for each in trends if each.steps), None)
            if drawn is not None:
                found.setdefault(panel, []).append(drawn)
    return {panel: tuple(found[panel]) for panel in HEALTH if panel in found}


def trend(arm: str, metric: str, logs: Iterable[Sequence[Mapping[str, Any]]]) -> Trend:
    """Return the mean of a metric over runs, step by step; steps that lack it count for nothing."""
    values: dict[int, list[float]] = {}
    for log in logs:
        for row in log:
            value = row.get(metric)
            if value is not None and math.isfinite(value):
                values.setdefault(row["step"], []).append(value)
    means = [(step, sum(found) / len(found)) for step, found in sorted(values.items())]
    width = max(1, math.ceil(len(means) / HEALTH_POINTS))
    stretches = [means[start : start + width] for start in range(0, len(means), width)]
    return Trend(
        metric=metric,
        arm=arm,
        steps=tuple(sum(step for step, _ in each) / len(each) for each in stretches),
        values=tuple(sum(value for _, value in each) / len(each) for each in stretches),
    )
