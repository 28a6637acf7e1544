"""Collects the contents of a run's report for its HTML and Markdown files.

If files in the run folder are missing or damaged, the report says so and shows the other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.errors import RunError
from covey.lab.compare.report_contents import (
    HEALTH,
    Example,
    Trend,
    choose_examples,
    trends,
)
from covey.lab.page.render import TextTable
from covey.lab.ui.group_views import Entry, RolloutIndex
from covey.records.folder import RunFolder, settings_of
from covey.records.health import Finding, timeline
from covey.records.metric_registry import change_text, estimate_text, is_number, value_text
from covey.records.records import MOST_TEXT, Note, read_bytes

PANELS = MappingProxyType(
    {
        "reward": HEALTH["reward"],
        "correct": ("objective/verifiable_correct_rate",),
        "loss": ("sft/loss",),
        **HEALTH,
    }
)
"""Maps each chart of the report to the metrics that the chart can show. If the run logged several
metrics of a chart, the chart shows the first of them.
"""
SAMPLES = 3
"""The report has two lists of SAMPLES rollouts: the rollouts with the highest rewards, and the
rollouts with the lowest rewards."""
READ_SECONDS = 60.0
"""The time limit, in seconds, for reading the last step's rollouts. The report ignores rollouts
that could not be read within the time limit."""
KINDS = MappingProxyType(
    {
        "arms differ": "Changed",
        "all correct": "Correct before and after",
        "all incorrect": "Incorrect before and after",
    }
)
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All contents of a run's report."""

    name: str
    headline: str
    about: str
    trends: Mapping[str, Trend]
    """Maps each chart of the report to its curve."""
    evaluations: TextTable
    examples: Sequence[Example]
    """Held-out prompts with their greedy completions before and after training."""
    sampled_step: int | None
    samples: Sequence[Mapping[str, Any]]
    """The last step's rollouts with the highest rewards, and then with the lowest rewards."""
    findings: Sequence[Finding]
    command: str
    environment: str
    config: str
    notes: Sequence[str]
    """Notes about files in the run folder that could not be read."""


def run_report(run: RunFolder) -> RunReport:
    """Collect all contents of a run's report."""
    notes: list[str] = []
    steps, evaluations = run.steps(notes.append), run.evaluations(notes.append)
    environment = run.environment(notes.append)
    sampled, samples = _samples(run, notes.append)
    return RunReport(
        name=run.path.resolve().name,
        headline=headline(steps, evaluations),
        about=_about(run, steps, environment),
        trends=trends("", PANELS, [steps]),
        evaluations=evaluation_table(evaluations),
        examples=_examples(run, evaluations, notes.append),
        sampled_step=sampled,
        samples=samples,
        findings=timeline(steps, settings_of(run)),
        command=" ".join(environment.get("command", [])) or "not recorded",
        environment=json.dumps({k: v for k, v in environment.items() if k != "config"}, indent=2),
        config=_config(run, notes.append),
        notes=notes,
    )


def headline(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence with the result of the run."""
    if len(evaluations) > 1:
        name, what = decided_by(evaluations)
        first, last = evaluations[0][name], evaluations[-1][name]
        clear = last["low"] > first["high"] or last["high"] < first["low"]
        change = change_text(name, last["value"] - first["value"])
        start, end = evaluations[0]["step"], evaluations[-1]["step"]
        when = f"from step {start} to step {end}" if start else f"in {end} steps"
        return (
            f"{what} went from {value_text(name, first['value'])} to "
            f"{value_text(name, last['value'])} {when} "
            f"({change}{'' if clear else ', within noise'})"
        )
    rewards = [row["objective/scores"] for row in steps if is_number(row.get("objective/scores"))]
    if rewards:
        return f"Mean reward went from {rewards[0]:.3g} to {rewards[-1]:.3g} in {len(steps)} steps"
    return f"{len(steps)} steps, and no evaluation"


def decided_by(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the key of an evaluation's main result, and the name of this result in the report.

    The main result is the accuracy, or the mean reward if no completion was ever correct.
    """
    correct = any(row["greedy"]["value"] for row in evaluations)
    if correct or not all("reward" in row for row in evaluations):
        return "greedy", "Held-out accuracy"
    return "reward", "Held-out mean reward"


def _about(
    run: RunFolder, steps: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
) -> str:
    settings = settings_of(run)
    named = (("objective", "name"), ("task", "name"), ("model", "path"))
    facts = [
        *(str(settings.get(section, {}).get(key) or "") for section, key in named),
        f"{len(steps)} steps",
        f"seed {environment['seed']}" if "seed" in environment else "",
        str(environment.get("device") or ""),
        f"started {environment['started']}" if "started" in environment else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table with one row for each evaluation."""
    return TextTable(
        title="Accuracy by step",
        head=["step", "greedy", "reward", "best constant", "distinct answers", "prompts"],
        rows=[
            [
                str(row["step"]),
                estimate_text("greedy", row["greedy"]),
                estimate_text("reward", row["reward"]) if "reward" in row else "-",
                "-" if row.get("best_constant") is None else f"{row['best_constant']:.1%}",
                "-" if row.get("distinct_answers") is None else str(row["distinct_answers"]),
                str(row["prompts"]),
            ]
            for row in evaluations
        ],
        note="Means with 95 % intervals over prompts. Best constant: accuracy of the one answer "
        "that is right most often.",
    )


def _examples(
    run: RunFolder, evaluations: Sequence[Mapping[str, Any]], note: Note
) -> tuple[Example, ...]:
    if len(evaluations) < 2:
        return ()
    times = {BEFORE: evaluations[0]["step"], AFTER: evaluations[-1]["step"]}
    rows = {
        name: {row["prompt_id"]: row for row in run.items(step, note)}
        for name, step in times.items()
    }
    return choose_examples(rows) if all(rows.values()) else ()


def _samples(run: RunFolder, note: Note) -> tuple[int | None, list[Mapping[str, Any]]]:
    """Return the last recorded step, and its rollouts with the highest and lowest rewards."""
    kept = run.numbered("rollouts", ".jsonl")
    if not kept:
        return None, []
    step, path = kept[-1]
    index = RolloutIndex(path)
    try:
        index.update(READ_SECONDS)
    except RunError as error:
        note(str(error))
    for problem in index.notes:
        note(problem)
    if not index.done:
        note(f"{path} is large, so only its first {index.share:.0%} was read")
    rows: list[Mapping[str, Any]] = []
    for kind, entry in _extremes(index.entries):
        try:
            rows.append({**index.row(entry.line), "kind": kind})
        except RunError as error:
            note(str(error))
    return step, rows


def _extremes(entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    scored = sorted((e for e in entries if e.reward is not None), key=lambda e: -(e.reward or 0.0))
    distinct = list({entry.text: entry for entry in reversed(scored)}.values())[::-1]
    highest = distinct[:SAMPLES]
    lowest = distinct[max(SAMPLES, len(distinct) - SAMPLES) :]
    return [("highest", entry) for entry in highest] + [("lowest", entry) for entry in lowest]


def _config(run: RunFolder, note: Note) -> str:
    try:
        return read_bytes(run.config_file, MOST_TEXT).decode("utf-8", "replace")
    except RunError as error:
        note(str(error))
        return "not recorded"
