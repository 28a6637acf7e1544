"""The report as one page that opens anywhere: no server, no network, nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from covey._version import __version__
from covey.analysis.compare.charts import chart_data, page_file, plotly_source
from covey.analysis.compare.facts import Facts
from covey.analysis.compare.listings import differences_table, runs_table
from covey.analysis.compare.markup import (
    Html,
    details,
    element,
    embedded_json,
    finite,
    join,
    policy,
    script,
    table,
)
from covey.analysis.compare.sections import (
    answers_section,
    arm_label,
    curves_section,
    findings_section,
    health_section,
    making_section,
    problems_section,
    text_table,
    words_section,
)
from covey.analysis.compare.tables import (
    checkpoint_table,
    course_table,
    matrix,
    pair_words,
    reach_table,
    result_table,
)
from covey.analysis.compare.words import count


def page(facts: Facts) -> str:
    """Return the whole page."""
    library = plotly_source()
    scripts = [library, page_file("report.js")] if library is not None else []
    title = f"{facts.comparison.name}: comparison"
    sections = list(_sections(facts, charts=library is not None))
    head = join(
        [
            Html('<meta charset="utf-8">'),
            policy(scripts),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            element("title", title),
            Html(f"<style>{page_file('report.css')}</style>"),
        ]
    )
    body = [
        element("a", "Skip to the results", href="#results", class_="skip"),
        _header(facts, [(name, heading) for name, heading, _ in sections]),
        element("main", *(_section(*each) for each in sections)),
        element(
            "footer", f"Written by covey {__version__}. This file loads nothing from anywhere."
        ),
    ]
    if library is not None:
        data = chart_data(facts.comparison, facts.curves, facts.evidence)
        body += [embedded_json(finite(data), "chart-data"), *map(script, scripts)]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{join(body)}</body></html>\n'


def _section(name: str, heading: str, content: Html) -> Html:
    return element("section", element("h2", heading), content, id=name)


def _header(facts: Facts, sections: list[tuple[str, str]]) -> Html:
    comparison, verdict = facts.comparison, facts.verdict
    about = (
        f"{count(len(comparison.arms), 'arm')}, {count(len(comparison.seeds), 'seed')} each, "
        f"{comparison.amount:,} {comparison.budget} a run"
    )
    links = (element("li", element("a", heading, href=f"#{name}")) for name, heading in sections)
    cautions = element("div", *(element("p", text) for text in verdict.cautions), class_="caution")
    # What follows a colon may begin with an arm's name: it is not made a sentence of its own.
    first, *rest = re.split(r"(?<=[:.]) ", verdict.headline, maxsplit=1)
    return element(
        "header",
        element("h1", f"{comparison.name}: which is better?"),
        element("p", first, class_="headline"),
        *(element("p", text) for text in rest),
        *([cautions] if verdict.cautions else []),
        element("p", about, class_="quiet"),
        element("nav", element("ul", *links), aria_label="Sections"),
    )


def _sections(facts: Facts, *, charts: bool) -> Iterator[tuple[str, str, Html]]:
    """Yield name, heading and content of each section, the most asked for first."""
    comparison, evidence = facts.comparison, facts.evidence
    yield "results", "Results", _results(facts)
    yield "curves", "Learning curves", curves_section(comparison, facts.curves, charts)
    yield "pairs", "Pair by pair", _pairs(facts)
    if comparison.findings:
        yield "findings", "Known before training", findings_section(comparison)
    if facts.agreement is not None:
        problems = problems_section(facts.agreement, evidence.texts)
        yield "problems", "Problem by problem", problems
    yield "answers", "Answers side by side", answers_section(evidence)
    yield "health", "Training health", health_section(comparison, evidence, charts)
    for name, made in (
        ("differences", differences_table(comparison)),
        ("runs", runs_table(comparison)),
    ):
        yield name, made.title, words_section(made, comparison)
    yield "making", "How it was made", making_section(comparison)


def _results(facts: Facts) -> Html:
    made = (result_table, course_table, reach_table)
    tables = (text_table(each(facts.verdict), facts.comparison) for each in made)
    return element("div", *tables, class_="beside")


def _pairs(facts: Facts) -> Html:
    found = facts.verdict
    made = matrix(found)
    rows = [
        [arm_label(facts.comparison, arm), *(_lines(cell) for cell in cells)]
        for arm, *cells in made.rows
    ]
    checkpoints = details(
        "Which of the checkpoints is better, seed by seed",
        element("ul", *(element("li", p.checkpoint_words) for p in found.pairs if p.checkpoints)),
        text_table(checkpoint_table(found)),
    )
    said = [element("li", text) for text in pair_words(found)]
    shown = table(made.title, made.head, rows, note=made.note)
    words = [element("ul", *said)] if said else []
    return join([shown, *words, checkpoints])


def _lines(cell: str) -> Html:
    first, *more = cell.split("\n")
    return join([first, *(element("small", line) for line in more)])
