"""The report for a terminal, and as Markdown for a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey.analysis.compare.evidence import Answered, Evidence
from covey.analysis.compare.facts import Facts
from covey.analysis.compare.listings import (
    TextTable,
    contested_table,
    differences_table,
    finding_title,
    runs_table,
    solved_table,
)
from covey.analysis.compare.outcome import Comparison
from covey.analysis.compare.tables import (
    checkpoint_table,
    course_table,
    pair_table,
    pair_words,
    reach_table,
    result_table,
)
from covey.analysis.compare.verdict import verdict
from covey.escape import printable


def terminal_table(comparison: Comparison) -> RenderableType:
    """Return the table of results, what can be said of each pair, and the findings."""
    found = verdict(comparison)
    lines = [
        _text(found.headline, style="bold"),
        *(_text(f"! {text}", style="yellow") for text in found.cautions),
        *(_text(f"- {text}") for text in pair_words(found)),
    ]
    for finding in comparison.findings:
        told = f"{finding_title(finding)}: {finding.get('remedy', '')}"
        lines.append(_text(told, style="dim"))
    return Group(_rich_table(result_table(found)), *lines)


def _rich_table(made: TextTable) -> Table:
    table = Table(title=_text(made.title), caption=_text(made.note))
    for number, heading in enumerate(made.head):
        table.add_column(_text(heading), justify="right" if number else "left")
    for row in made.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(text: str, style: str = "") -> Text:
    """Return text for a terminal: a name with brackets is no markup, nor an escape an order."""
    return Text(printable(text), style=style)


def markdown(facts: Facts) -> str:
    """Return the report for a comment on GitHub."""
    return "\n\n".join(_parts(facts)) + "\n"


def _parts(facts: Facts) -> Iterator[str]:
    comparison, found = facts.comparison, facts.verdict
    yield f"## {plain(comparison.name)}: which is better?"
    yield f"**{plain(found.headline)}**"
    if found.cautions:
        yield "\n".join(f"> {plain(text)}  " for text in found.cautions)
    yield from _table(result_table(found))
    if pair_words(found):
        yield "\n".join(f"- {plain(text)}" for text in pair_words(found))
    tables = (pair_table, course_table, reach_table, checkpoint_table)
    for made in (table(found) for table in tables):
        yield from _table(made)
    if facts.agreement is not None:
        yield from _table(solved_table(facts.agreement))
        yield from _table(contested_table(facts.agreement, facts.evidence.texts))
    yield from _answers(facts.evidence)
    yield from _findings(comparison)
    yield from _table(differences_table(comparison))
    yield from _table(runs_table(comparison))
    yield f"Made by\n\n{fenced(comparison.command)}"
    yield _folded("Common configuration", fenced(comparison.config_toml))
    environment = json.dumps(dict(comparison.environment), indent=2, default=str)
    yield _folded("Environment", fenced(environment))


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def _table(made: TextTable) -> Iterator[str]:
    if not made.rows:
        return
    yield f"### {plain(made.title)}"
    head, *rows = ([plain(cell) for cell in row] for row in (made.head, *made.rows))
    rule = [":--", *["--:"] * (len(head) - 1)]
    yield "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
    if made.note:
        yield plain(made.note)


def _answers(evidence: Evidence) -> Iterator[str]:
    if not evidence.side_by_side:
        return
    shown = "\n\n".join(_answered(problem) for problem in evidence.side_by_side)
    yield _folded(f"Answers side by side, seed {evidence.seed}", shown)


def _answered(problem: Answered) -> str:
    about = f"**{problem.kind}**: expected {plain(problem.expected)}"
    answers = (
        f"{plain(arm)}, {'right' if answer['right'] else 'wrong'}:\n\n{fenced(answer['text'])}"
        for arm, answer in problem.answers.items()
    )
    return "\n\n".join([about, fenced(problem.prompt), *answers])


def _findings(comparison: Comparison) -> Iterator[str]:
    if comparison.findings:
        yield "### Known before training"
        yield "\n".join(
            f"- **{plain(finding_title(row))}** {plain(row.get('why', ''))} "
            f"{plain(row.get('remedy', ''))}"
            for row in comparison.findings
        )


def plain(text: str) -> str:
    """Return text of which Markdown makes nothing else, in one line.

    >>> plain("a|b <c> *d*")
    'a\\\\|b &lt;c&gt; \\\\*d\\\\*'
    """
    line = (
        printable(" ".join(text.split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    # A zero-width space keeps @name from notifying anybody.
    return re.sub(r"([\\|`*_\[\]#~])", r"\\\1", line).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """Return text as a block of code, in a fence longer than any that it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable(text.rstrip())}\n{fence}"
