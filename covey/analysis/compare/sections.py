"""Sections of the page that show what lies behind the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from covey.analysis.compare.agreement import Agreement
from covey.analysis.compare.charts import COLOURS, MISSING
from covey.analysis.compare.curves import AXES, Curve
from covey.analysis.compare.evidence import Answered, Evidence
from covey.analysis.compare.listings import (
    NOTHING,
    TextTable,
    contested_table,
    finding_title,
    solved_table,
)
from covey.analysis.compare.markup import Html, details, element, join, table
from covey.analysis.compare.outcome import Comparison

LONGEST_ANSWER = 3000
"""Characters of an answer that are shown."""


def arm_label(comparison: Comparison, arm: str) -> Html:
    """Return an arm's name with its colour."""
    number = [each.name for each in comparison.arms].index(arm) % COLOURS
    return join([element("span", class_=f"key arm-{number}", aria_hidden="true"), arm])


def _legend(comparison: Comparison) -> Html:
    names = (element("li", arm_label(comparison, arm.name)) for arm in comparison.arms)
    return element("ul", *names, class_="legend")


def curves_section(comparison: Comparison, curves: tuple[Curve, ...], charts: bool) -> Html:
    """Learning curves over an axis of the reader's choice, and the numbers they are drawn from."""
    if not any(each.lines for each in curves):
        return element("p", "No run has been evaluated yet.", class_="quiet")
    numbers = details(
        "The numbers of these curves", join(_curve_table(each) for each in curves if each.mean)
    )
    if not charts:
        return join([element("p", MISSING, class_="quiet"), numbers])
    choices = (
        element(
            "label",
            Html(
                f'<input type="radio" name="axis" value="{axis}"'
                f"{' checked' if axis == comparison.budget else ''}> "
            ),
            label,
        )
        for axis, (label, _) in AXES.items()
    )
    explained = (
        "Thick: the mean over finished seeds. Band: from the lowest to the highest of them, which "
        "is what was seen and not a confidence interval. Thin: each seed; dotted where the run did "
        "not finish."
    )
    return join(
        [
            element("fieldset", element("legend", "Over"), *choices),
            _legend(comparison),
            element(
                "div", id="chart-curves", class_="chart", role="img", aria_label="Learning curves"
            ),
            element("p", explained, class_="quiet"),
            numbers,
        ]
    )


def _curve_table(curve: Curve) -> Html:
    head = [*AXES, "mean", "lowest", "highest", *(f"seed {seed}" for seed in curve.seeds)]
    seeds = curve.seeds.values()
    rows = [
        [
            *(f"{curve.x[axis][at]:,.0f}" for axis in AXES),
            *(f"{values[at]:.1%}" for values in (curve.mean, curve.low, curve.high)),
            *(NOTHING if (value := seed[at]) is None else f"{value:.1%}" for seed in seeds),
        ]
        for at in range(len(curve.mean))
    ]
    return table(curve.arm, head, rows)


def text_table(made: TextTable, comparison: Comparison | None = None) -> Html:
    """Return a table for the page; with a comparison, the first column gets its arms' colours."""
    rows = [
        [arm_label(comparison, row[0]) if comparison is not None else row[0], *row[1:]]
        for row in made.rows
    ]
    return table(made.title, made.head, rows, note=made.note) if rows else Html()


def problems_section(found: Agreement, texts: Mapping[str, tuple[str, str]]) -> Html:
    """How many problems all arms solve, none, or one alone; and where they differ most."""
    contested = element("div", text_table(contested_table(found, texts)), class_="words")
    return join([text_table(solved_table(found)), contested])


def answers_section(evidence: Evidence) -> Html:
    """Show the same problems under every arm, right and wrong."""
    if not evidence.side_by_side:
        return element("p", "The runs kept no answers of their evaluations.", class_="quiet")
    about = f"Greedy answers at the end of training, of the runs with seed {evidence.seed}."
    return join([element("p", about, class_="quiet"), *map(_answered, evidence.side_by_side)])


def _answered(problem: Answered) -> Html:
    return join(
        [
            element("h3", f"{problem.kind.capitalize()}: {problem.prompt_id}"),
            element("pre", problem.prompt, class_="question"),
            element("p", "expected ", element("code", problem.expected), class_="quiet"),
            element(
                "div",
                *(_answer(arm, answer) for arm, answer in problem.answers.items()),
                class_="answers",
            ),
        ]
    )


def _answer(arm: str, answer: Mapping[str, Any]) -> Html:
    right = {True: "✓ right", False: "✗ wrong", None: "? not scored"}[answer["right"]]
    kind = "right" if answer["right"] else "wrong"
    cut = "" if answer["finish"] == "stop" else f", ended by {answer['finish']}"
    text = answer["text"]
    more = len(text) - LONGEST_ANSWER
    return element(
        "article",
        element("h4", arm, " ", element("span", right, class_=kind)),
        element("pre", text[:LONGEST_ANSWER] + (f"\n… {more:,} characters more" * (more > 0))),
        element("small", f"{answer['tokens']} tokens{cut}"),
        class_="answer",
    )


def health_section(comparison: Comparison, evidence: Evidence, charts: bool) -> Html:
    """Small multiples of what training looked like; without charts its first and last values."""
    if not evidence.health:
        return element("p", "The runs kept no metrics of their steps.", class_="quiet")
    if not charts:
        rows = [
            [f"{panel} ({t.metric})", t.arm, f"{t.values[0]:.4g}", f"{t.values[-1]:.4g}"]
            for panel, trends in evidence.health.items()
            for t in trends
        ]
        return table("First and last of each metric", ["metric", "arm", "first", "last"], rows)
    panels = (
        element(
            "div",
            element(
                "h3",
                f"{panel} ",
                element("code", ", ".join(dict.fromkeys(t.metric for t in trends))),
            ),
            element(
                "div", id=f"chart-health-{number}", class_="chart", role="img", aria_label=panel
            ),
        )
        for number, (panel, trends) in enumerate(evidence.health.items())
    )
    about = "The mean over an arm's seeds, by training step; long runs are averaged in stretches."
    return join(
        [
            element("p", about, class_="quiet"),
            _legend(comparison),
            element("div", *panels, class_="small-multiples"),
        ]
    )


def words_section(made: TextTable, comparison: Comparison) -> Html:
    """Return a table of texts, one row or more for each arm."""
    return element("div", text_table(made, comparison), class_="words")


def findings_section(comparison: Comparison) -> Html:
    """Show what was known before training."""
    return join(
        element(
            "div",
            element("h3", finding_title(row)),
            element("p", row.get("why", "")),
            element("p", f"{row.get('remedy', '')} ", element("small", row.get("docs", ""))),
        )
        for row in comparison.findings
    )


def making_section(comparison: Comparison) -> Html:
    """Say how to make all this again: command, environment, common configuration."""
    environment = json.dumps(dict(comparison.environment), indent=2, default=str)
    return join(
        [
            element("h3", "Command"),
            element("pre", comparison.command, tabindex=0),
            details("Environment", element("pre", environment, tabindex=0)),
            details("Common configuration", element("pre", comparison.config_toml, tabindex=0)),
        ]
    )
