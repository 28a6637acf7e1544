"""The HTML report: one file that opens offline and loads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from covey._version import __version__
from covey.analysis.compare import report_tables as tables
from covey.analysis.compare.comparison import Comparison
from covey.analysis.compare.conclusion import Conclusion, count
from covey.analysis.compare.html_elements import (
    Html,
    details,
    element,
    embedded_json,
    finite,
    join,
    script,
    security_policy,
    table,
)
from covey.analysis.compare.learning_curves import AXES, Curve
from covey.analysis.compare.report_contents import Example, ReportContents
from covey.analysis.compare.report_tables import EMPTY, TextTable

COLOURS = 8
"""Colours of arms in the style sheet; further arms reuse them with other dashes."""
LONGEST_COMPLETION = 3000
"""Characters of a completion that are shown."""
MISSING = "Charts are left out: they need plotly, from pip install 'covey[ui]'."


def page(contents: ReportContents) -> str:
    """Return the whole page."""
    library = _plotly_source()
    scripts = [library, page_file("report.js")] if library is not None else []
    sections = list(_sections(contents, charts=library is not None))
    head = join(
        [
            Html('<meta charset="utf-8">'),
            security_policy(scripts),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            element("title", f"{contents.comparison.name}: comparison"),
            Html(f"<style>{page_file('report.css')}</style>"),
        ]
    )
    body = [
        element("a", "Skip to the results", href="#results", class_="skip"),
        _header(contents, [(name, heading) for name, heading, _ in sections]),
        element(
            "main",
            *(
                element("section", element("h2", heading), content, id=name)
                for name, heading, content in sections
            ),
        ),
        element("footer", f"Written by covey {__version__}. This file loads nothing."),
    ]
    if library is not None:
        body += [embedded_json(finite(_chart_data(contents)), "chart-data"), *map(script, scripts)]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{join(body)}</body></html>\n'


def page_file(name: str) -> str:
    """Return a file of the page: its style sheet or its script."""
    return files("covey.analysis.compare").joinpath("page", name).read_text(encoding="utf-8")


def _plotly_source() -> str | None:
    """Return plotly's script, or None without plotly: a report is useful without charts."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return str(get_plotlyjs())


def _chart_data(contents: ReportContents) -> dict[str, Any]:
    """Return the data that page/report.js draws."""
    return {
        "arms": [arm.name for arm in contents.comparison.arms],
        "axes": {name: label for name, (label, _) in AXES.items()},
        "curves": [asdict(curve) for curve in contents.curves],
        "health": {panel: [asdict(t) for t in trends] for panel, trends in contents.health.items()},
    }


def _header(contents: ReportContents, sections: list[tuple[str, str]]) -> Html:
    comparison, conclusion = contents.comparison, contents.conclusion
    about = (
        f"{count(len(comparison.arms), 'arm')}, {count(len(comparison.seeds), 'seed')} each, "
        f"{comparison.amount:,} {comparison.budget} per run"
    )
    links = (element("li", element("a", heading, href=f"#{name}")) for name, heading in sections)
    cautions = (element("p", text) for text in conclusion.cautions)
    # The text after a colon may begin with an arm's name, so its first letter stays as it is.
    first, *rest = re.split(r"(?<=[:.]) ", conclusion.headline, maxsplit=1)
    return element(
        "header",
        element("h1", f"{comparison.name}: which is better?"),
        element("p", first, class_="headline"),
        *(element("p", text) for text in rest),
        *([element("div", *cautions, class_="caution")] if conclusion.cautions else []),
        element("p", about, class_="quiet"),
        element("nav", element("ul", *links), aria_label="Sections"),
    )


def _sections(contents: ReportContents, *, charts: bool) -> Iterator[tuple[str, str, Html]]:
    """Yield id, heading and content of each section, the most important first."""
    comparison = contents.comparison
    yield "results", "Results", _results(contents)
    yield "curves", "Learning curves", _curves(contents, charts)
    yield "pairs", "Pairs of arms", _pairs(contents.conclusion)
    if comparison.findings:
        yield "findings", "Known before training", _findings(comparison)
    if contents.agreement is not None:
        solved = tables.solved_table(contents.agreement)
        contested = tables.contested_table(contents.agreement, contents.texts)
        yield "prompts", "Held-out prompts", join([_table(solved), _wide_table(contested)])
    yield "completions", "Completions side by side", _examples(contents)
    yield "health", "Training health", _health(contents, charts)
    for name, made in (
        ("differences", tables.differences_table(comparison)),
        ("runs", tables.runs_table(comparison)),
    ):
        yield name, made.title, _wide_table(made, comparison)
    yield "reproduction", "Reproduction", _reproduction(comparison)


def _arm_label(comparison: Comparison, arm: str) -> Html:
    """Return an arm's name with its colour."""
    number = [each.name for each in comparison.arms].index(arm) % COLOURS
    return join([element("span", class_=f"key arm-{number}", aria_hidden="true"), arm])


def _legend(comparison: Comparison) -> Html:
    names = (element("li", _arm_label(comparison, arm.name)) for arm in comparison.arms)
    return element("ul", *names, class_="legend")


def _table(made: TextTable, comparison: Comparison | None = None) -> Html:
    """Return a table; with a comparison, its first column gets the arms' colours."""
    rows = [
        [_arm_label(comparison, row[0]) if comparison is not None else row[0], *row[1:]]
        for row in made.rows
    ]
    return table(made.title, made.head, rows, note=made.note) if rows else Html()


def _wide_table(made: TextTable, comparison: Comparison | None = None) -> Html:
    """Return a table with long texts in its cells."""
    return element("div", _table(made, comparison), class_="texts")


def _quiet(text: str) -> Html:
    return element("p", text, class_="quiet")


def _results(contents: ReportContents) -> Html:
    made = (tables.result_table, tables.training_table, tables.speed_table)
    shown = (_table(each(contents.conclusion), contents.comparison) for each in made)
    return element("div", *shown, class_="beside")


def _curves(contents: ReportContents, charts: bool) -> Html:
    """Return learning curves over a selectable axis, and a table of their numbers."""
    if not any(each.lines for each in contents.curves):
        return _quiet("No run has been evaluated yet.")
    curves = (_curve_table(each) for each in contents.curves if each.mean)
    numbers = details("The numbers of these curves", *curves)
    if not charts:
        return join([_quiet(MISSING), numbers])
    budget = contents.comparison.budget
    choices = (
        element(
            "label",
            Html(
                f'<input type="radio" name="axis" value="{axis}"'
                f"{' checked' if axis == budget else ''}> "
            ),
            label,
        )
        for axis, (label, _) in AXES.items()
    )
    return join(
        [
            element("fieldset", element("legend", "Over"), *choices),
            _legend(contents.comparison),
            element(
                "div", id="chart-curves", class_="chart", role="img", aria_label="Learning curves"
            ),
            _quiet(
                "Thick line: mean over finished seeds. Band: range of the finished seeds, not a "
                "confidence interval. Thin lines: single seeds, dotted if the run did not finish."
            ),
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
            *(EMPTY if (value := seed[at]) is None else f"{value:.1%}" for seed in seeds),
        ]
        for at in range(len(curve.mean))
    ]
    return table(curve.arm, head, rows)


def _pairs(conclusion: Conclusion) -> Html:
    summaries = [element("li", text) for text in tables.pair_summaries(conclusion)]
    checkpoints = (element("li", p.checkpoint_summary) for p in conclusion.pairs if p.checkpoints)
    return join(
        [
            _table(tables.pair_table(conclusion)),
            *([element("ul", *summaries)] if summaries else []),
            details(
                "Which checkpoint is better, by seed",
                element("ul", *checkpoints),
                _table(tables.checkpoint_table(conclusion)),
            ),
        ]
    )


def _findings(comparison: Comparison) -> Html:
    return join(
        element(
            "div",
            element("h3", tables.finding_title(row)),
            element("p", row.get("why", "")),
            element("p", f"{row.get('remedy', '')} ", element("small", row.get("docs", ""))),
        )
        for row in comparison.findings
    )


def _examples(contents: ReportContents) -> Html:
    """Return prompts with the completion of every arm."""
    if not contents.examples:
        return _quiet("The runs kept no completions of their evaluations.")
    about = "Greedy completions at the end of training, from the runs with seed "
    return join([_quiet(f"{about}{contents.example_seed}."), *map(_example, contents.examples)])


def _example(example: Example) -> Html:
    completions = (_completion(arm, each) for arm, each in example.completions.items())
    return join(
        [
            element("h3", f"{example.kind.capitalize()}: {example.prompt_id}"),
            element("pre", example.prompt, class_="prompt"),
            element("p", "target ", element("code", example.target), class_="quiet"),
            element("div", *completions, class_="completions"),
        ]
    )


def _completion(arm: str, found: Mapping[str, Any]) -> Html:
    label = {True: "✓ correct", False: "✗ incorrect", None: "? not scored"}[found["correct"]]
    kind = "correct" if found["correct"] else "incorrect"
    cut = "" if found["finish"] == "stop" else f", ended by {found['finish']}"
    text = found["text"]
    more = len(text) - LONGEST_COMPLETION
    return element(
        "article",
        element("h4", arm, " ", element("span", label, class_=kind)),
        element("pre", text[:LONGEST_COMPLETION] + (f"\n… {more:,} more characters" * (more > 0))),
        element("small", f"{found['tokens']} tokens{cut}"),
        class_="completion",
    )


def _health(contents: ReportContents, charts: bool) -> Html:
    """Return small charts of training metrics; without plotly their first and last values."""
    if not contents.health:
        return _quiet("The runs kept no metrics of their steps.")
    if not charts:
        rows = [
            [f"{panel} ({t.metric})", t.arm, f"{t.values[0]:.4g}", f"{t.values[-1]:.4g}"]
            for panel, trends in contents.health.items()
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
        for number, (panel, trends) in enumerate(contents.health.items())
    )
    return join(
        [
            _quiet("Mean over an arm's seeds, by training step; long runs are averaged."),
            _legend(contents.comparison),
            element("div", *panels, class_="small-multiples"),
        ]
    )


def _reproduction(comparison: Comparison) -> Html:
    """Return the command, the environment and the common configuration."""
    environment = json.dumps(dict(comparison.environment), indent=2, default=str)
    return join(
        [
            element("h3", "Command"),
            element("pre", comparison.command, tabindex=0),
            details("Environment", element("pre", environment, tabindex=0)),
            details("Common configuration", element("pre", comparison.config_toml, tabindex=0)),
        ]
    )
