"""Builds the text tables that the HTML, Markdown and terminal reports share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from covey.evaluation.intervals import Estimate
from covey.lab.compare.arm_results import AXES, Agreement, ArmResult, Curve, TimeToAccuracy
from covey.lab.compare.comparison import Comparison, Metric, RunResult
from covey.lab.compare.conclusion import TESTS, Conclusion, points
from covey.lab.page import TextTable, Trend
from covey.records.metric_registry import value_text

EMPTY = "-"
NO_OPTION = "(no such option)"
VALUES: Mapping[Metric, str] = {"success": "accuracy", "reward": "mean reward"}
RESULT_NOTES: Mapping[Metric, str] = {
    "success": "Means over finished seeds. Improvement in percentage points, with a 95 % interval "
    "over seeds and prompts.",
    "reward": "Means over finished seeds. Improvement with a 95 % interval over seeds and prompts.",
}
CONSTANT_NOTE = (
    "Above constant: final accuracy minus that of the best constant answer, in percentage points."
)
ANSWERS_NOTE = "Answers: different final answers at the end."
TRAINING_NOTE = (
    "Best: mean of each seed's highest evaluation, biased upwards because the held-out prompts "
    "select it. Mean over training: {value} averaged over the budget. Collapsed: seeds that ended "
    "far below an earlier {value}."
)
PAIR_NOTE = (
    "{difference} at the end, over the seeds that both arms finished, with simultaneous 95 % "
    "intervals over seeds and p corrected for all pairs (Bonferroni): an interval excludes 0 if "
    "and only if p is below 0.05. Both consider runs unlike all seeds. Needed: seeds per "
    "arm for 80 % power if the difference is as observed."
)
NEEDED = {"cannot tell": "too many", "one seed": "at least 3", "two seeds": "at least 3"}
DIFFERENCES: Mapping[Metric, str] = {
    "success": "Percentage points",
    "reward": "Difference of mean rewards",
}
CHECKPOINT_NOTE = (
    "This compares two sets of weights, not two algorithms: another seed may reverse it. p of "
    "{test}, with Holm's correction over all pairs and seeds."
)


def result_table(found: Conclusion) -> TextTable:
    constant = any(arm.above_constant is not None for arm in found.arms)
    distinct = any(arm.distinct_answers is not None for arm in found.arms)
    more = [*["above constant"] * constant, *["answers"] * distinct]
    return TextTable(
        title=f"Held-out {VALUES[found.by]} before and after training",
        head=["arm", "initial", "final", "improvement", "95 % interval", *more, "seeds"],
        rows=[_result(arm, constant, distinct) for arm in found.arms],
        note=" ".join(
            [RESULT_NOTES[found.by], *([CONSTANT_NOTE] * constant), *([ANSWERS_NOTE] * distinct)]
        ),
    )


def _result(arm: ArmResult, constant: bool, distinct: bool) -> list[str]:
    change, above, answers = arm.improvement, arm.above_constant, arm.distinct_answers
    return [
        arm.arm,
        shown_level(arm.initial, arm),
        shown_level(arm.final, arm),
        EMPTY if change is None else points(change.value, arm.by),
        _interval(change, arm.by, arm.improvements if arm.seeds == 2 else ()),
        *([EMPTY if above is None else points(above)] if constant else []),
        *([EMPTY if answers is None else f"{answers:.3g}"] if distinct else []),
        str(arm.seeds),
    ]


def reward_table(found: Conclusion) -> TextTable:
    return TextTable(
        title="Mean reward and its parts, greedy",
        head=["arm", "", "initial", "final", "improvement", "95 % interval"],
        rows=[
            [
                arm.arm,
                name.removeprefix("parts/"),
                value_text("reward", reward.initial.value),
                value_text("reward", reward.final.value),
                points(reward.improvement.value, "reward"),
                EMPTY if arm.seeds == 2 else _interval(reward.improvement, "reward"),
            ]
            for arm in found.arms
            for name, reward in arm.rewards.items()
        ],
        note="Over the held-out prompts whose completions were scored. Two seeds have no interval.",
    )


def training_table(found: Conclusion) -> TextTable:
    return TextTable(
        title="Over training",
        head=["arm", "final, 95 % interval", "best", "mean over training", "collapsed"],
        rows=[
            [
                arm.arm,
                _final_interval(arm),
                shown_level(arm.best, arm),
                shown_level(arm.area, arm),
                f"{len(arm.collapsed)} of {arm.seeds} seeds" if arm.collapsed else EMPTY,
            ]
            for arm in found.arms
        ],
        note=TRAINING_NOTE.format(value=VALUES[found.by]),
    )


def _final_interval(arm: ArmResult) -> str:
    if arm.final is None:
        return EMPTY
    if arm.seeds == 2:
        return f"by seed: {', '.join(value_text(arm.by, each) for each in arm.finals)}"
    return f"[{value_text(arm.by, arm.final.low)}, {value_text(arm.by, arm.final.high)}]"


def speed_table(found: Conclusion) -> TextTable:
    timed = next((arm.time_to_accuracy for arm in found.arms if arm.time_to_accuracy), ())
    levels = [each.accuracy for each in timed]
    rows = []
    for arm in found.arms:
        reached = {each.accuracy: each for each in arm.time_to_accuracy}
        rows.append([arm.arm, *(_time(reached.get(x)) if arm.seeds else EMPTY for x in levels)])
    return TextTable(
        title=f"Time to {VALUES[found.by]}",
        head=["arm", *(f"{100 * x:.3g}%" if found.by == "success" else f"{x:.3g}" for x in levels)],
        rows=rows if levels else [],
        note="Sampled tokens and seconds of training, medians over finished seeds.",
    )


def _time(found: TimeToAccuracy | None) -> str:
    if found is None or found.tokens is None or found.seconds is None:
        return "not reached"
    return f"{found.tokens:,.0f} tokens, {found.seconds:,.0f} s"


def pair_summaries(found: Conclusion) -> list[str]:
    return [pair.summary for pair in found.pairs if not found.headline.startswith(pair.summary)]


def pair_table(found: Conclusion) -> TextTable:
    return TextTable(
        title="Pairs of arms",
        head=["first - second", "difference", "95 % interval", "p", "seeds", "needed"],
        rows=[
            [
                f"{pair.first} - {pair.second}",
                EMPTY if pair.mean is None else points(pair.mean, pair.by),
                _interval(
                    pair.difference,
                    pair.by,
                    pair.differences if pair.decision == "two seeds" else (),
                ),
                EMPTY if pair.p_corrected is None else p_value(pair.p_corrected),
                str(len(pair.seeds)),
                str(pair.seeds_needed or NEEDED.get(pair.decision, EMPTY)),
            ]
            for pair in found.pairs
        ],
        note=PAIR_NOTE.format(difference=DIFFERENCES[found.by]),
    )


def checkpoint_table(found: Conclusion) -> TextTable:
    return TextTable(
        title="Checkpoints of each seed",
        head=["first, second", "seed", "difference", "only 1st", "only 2nd", "p"],
        rows=[
            [
                f"{pair.first}, {pair.second}",
                str(one.seed),
                points(one.difference, pair.by),
                str(one.gained),
                str(one.lost),
                p_value(one.p_holm),
            ]
            for pair in found.pairs
            for one in pair.checkpoints
        ],
        note=CHECKPOINT_NOTE.format(test=TESTS[found.by]),
    )


def differences_table(comparison: Comparison) -> TextTable:
    rows = []
    for arm in comparison.arms:
        rows += [
            [arm.name, setting, NO_OPTION if value is None else json.dumps(value, default=str)]
            for setting, value in arm.differences.items()
        ] or [[arm.name, EMPTY, EMPTY]]
    return TextTable(
        title="Differences between arms",
        head=["arm", "setting", "value"],
        rows=rows,
        note="All other settings are those of the common configuration.",
    )


def finding_title(row: Mapping[str, str]) -> str:
    arms = f" ({row['arms']})" if row.get("arms") else ""
    return f"{row.get('title', '')}{arms}"


def runs_table(comparison: Comparison) -> TextTable:
    return TextTable(
        title="Runs",
        head=["arm", "seed", "state", "steps", "tokens", "seconds", "weights", "error"],
        rows=[_run(run) for arm in comparison.arms for run in comparison.runs_of(arm.name)],
        note="Runs with equal weights are the same policy, bit for bit.",
    )


def _run(run: RunResult) -> list[str]:
    end = [EMPTY] * 3
    if run.points:
        last = run.points[-1]
        end = [f"{last.step:,}", f"{last.tokens:,}", f"{last.seconds:,.0f}"]
    rest = [run.weights[:12] or EMPTY, run.error or EMPTY]
    return [run.arm, str(run.seed), run.state, *end, *rest]


def solved_table(found: Agreement) -> TextTable:
    counts = {
        "every arm": found.solved_by_all,
        "no arm": found.solved_by_none,
        **{f"only {arm}": count for arm, count in found.solved_only_by.items()},
    }
    if len(found.runs) > 2:
        counts["several arms, not all"] = found.solved_by_some
    return TextTable(
        title=f"The {found.num_prompts} held-out prompts at the end of training",
        head=["solved by", "prompts", "share"],
        rows=[[name, str(n), f"{n / found.num_prompts:.1%}"] for name, n in counts.items()],
        note="An arm solves a prompt if more than half of its finished seeds do. "
        + _disagreement(found),
    )


def _disagreement(found: Agreement) -> str:
    if found.disagreement_between_arms is None:
        return "No two arms have a finished run of the same seed."
    arms = (
        "Two arms with the same seed disagree on "
        f"{found.disagreement_between_arms:.1%} of the prompts"
    )
    if found.disagreement_between_seeds is None:
        return f"{arms}; one seed cannot show how much of that is chance."
    return f"{arms}, two seeds of the same arm on {found.disagreement_between_seeds:.1%}."


def contested_table(found: Agreement, texts: Mapping[str, tuple[str, str]]) -> TextTable:
    return TextTable(
        title="Prompts on which arms differ most",
        head=["prompt", "target", *found.runs],
        rows=[
            [
                *texts.get(prompt.id, (prompt.id, EMPTY)),
                *(f"{prompt.solved[arm]} of {count}" for arm, count in found.runs.items()),
            ]
            for prompt in found.most_different
        ],
        note="Number of an arm's finished seeds that solve the prompt.",
    )


def curve_table(curve: Curve, by: Metric = "success") -> TextTable:
    return TextTable(
        title=curve.arm,
        head=[*AXES, "mean", "lowest", "highest", *(f"seed {seed}" for seed in curve.seeds)],
        rows=[
            [
                *(f"{curve.x[axis][at]:,.0f}" for axis in AXES),
                *(value_text(by, values[at]) for values in (curve.mean, curve.low, curve.high)),
                *(
                    EMPTY if (v := seed[at]) is None else value_text(by, v)
                    for seed in curve.seeds.values()
                ),
            ]
            for at in range(len(curve.mean))
        ],
    )


def health_table(health: Mapping[str, Sequence[Trend]]) -> TextTable:
    return TextTable(
        title="First and last of each metric",
        head=["metric", "arm", "first", "last"],
        rows=[
            [f"{panel} ({t.metric})", t.arm, f"{t.values[0]:.4g}", f"{t.values[-1]:.4g}"]
            for panel, trends in health.items()
            for t in trends
        ],
    )


def p_value(p: float) -> str:
    """Format a p-value with three decimals.

    >>> p_value(0.0000123), p_value(0.04321), p_value(1.0)
    ('< 0.001', '0.043', '1.000')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _interval(estimate: Estimate | None, by: Metric, seeds: Sequence[float] = ()) -> str:
    """Format an interval of a difference or, with two seeds, the difference of each."""
    if seeds:
        return f"by seed: {', '.join(points(each, by) for each in seeds)}"
    if estimate is None:
        return EMPTY
    return f"[{points(estimate.low, by)}, {points(estimate.high, by)}]"


def shown_level(estimate: Estimate | None, arm: ArmResult) -> str:
    return EMPTY if estimate is None else value_text(arm.by, estimate.value)


# The cost table of a report: time and memory of each arm, beside its final accuracy.

COST_NOTE = (
    "Medians over finished seeds; memory is the largest. Seconds leave out the first step and "
    "evaluations, and depend on what else the machine does; CPU seconds are of the whole process. "
    "Memory is that of the GPU's tensors, or without a GPU of the whole process."
)


def cost_table(found: Conclusion) -> TextTable:
    costs = [(arm, arm.cost) for arm in found.arms if arm.cost is not None]
    return TextTable(
        title="Cost of a run",
        head=["arm", "final", "seconds of training", "CPU seconds", "peak memory, GiB"],
        rows=[
            [
                arm.arm,
                shown_level(arm.final, arm),
                f"{cost.seconds:,.0f}",
                EMPTY if cost.cpu_seconds is None else f"{cost.cpu_seconds:,.0f}",
                EMPTY if cost.memory_gib is None else f"{cost.memory_gib:.2f}",
            ]
            for arm, cost in costs
        ],
        note=COST_NOTE,
    )
