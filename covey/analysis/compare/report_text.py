"""The report as Markdown for a comment, and its summary for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey.analysis.compare import report_tables as tables
from covey.analysis.compare.comparison import Comparison
from covey.analysis.compare.conclusion import conclude
from covey.analysis.compare.report_contents import Example, ReportContents
from covey.analysis.compare.report_tables import TextTable
from covey.escape import printable


def terminal_report(comparison: Comparison) -> RenderableType:
    """Return the table of results, the headline, the pairs and the findings."""
    found = conclude(comparison)
    lines = [
        _text(found.headline, style="bold"),
        *(_text(f"! {text}", style="yellow") for text in found.cautions),
        *(_text(f"- {text}") for text in tables.pair_summaries(found)),
    ]
    lines += [
        _text(f"{tables.finding_title(row)}: {row.get('remedy', '')}", style="dim")
        for row in comparison.findings
    ]
    made = tables.result_table(found)
    table = Table(title=_text(made.title), caption=_text(made.note))
    for number, heading in enumerate(made.head):
        table.add_column(_text(heading), justify="right" if number else "left")
    for row in made.rows:
        table.add_row(*(_text(cell) for cell in row))
    return Group(table, *lines)


def _text(text: str, style: str = "") -> Text:
    """Return text for a terminal, without rich markup and control characters."""
    return Text(printable(text), style=style)


def markdown(contents: ReportContents) -> str:
    """Return the report for a comment on GitHub."""
    return "\n\n".join(_blocks(contents)) + "\n"


def _blocks(contents: ReportContents) -> Iterator[str]:
    comparison, found = contents.comparison, contents.conclusion
    yield f"## {plain(comparison.name)}: which is better?"
    yield f"**{plain(found.headline)}**"
    if found.cautions:
        yield "\n".join(f"> {plain(text)}  " for text in found.cautions)
    yield from _table(tables.result_table(found))
    if tables.pair_summaries(found):
        yield "\n".join(f"- {plain(text)}" for text in tables.pair_summaries(found))
    yield from _table(tables.pair_table(found))
    yield from _table(tables.training_table(found))
    yield from _table(tables.speed_table(found))
    yield from _table(tables.checkpoint_table(found))
    if contents.agreement is not None:
        yield from _table(tables.solved_table(contents.agreement))
        yield from _table(tables.contested_table(contents.agreement, contents.texts))
    if contents.examples:
        title = f"Completions side by side, seed {contents.example_seed}"
        yield _folded(title, "\n\n".join(map(_example, contents.examples)))
    if comparison.findings:
        yield "### Known before training"
        yield "\n".join(
            f"- **{plain(tables.finding_title(row))}** {plain(row.get('why', ''))} "
            f"{plain(row.get('remedy', ''))}"
            for row in comparison.findings
        )
    yield from _table(tables.differences_table(comparison))
    yield from _table(tables.runs_table(comparison))
    yield f"Command\n\n{fenced(comparison.command)}"
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


def _example(example: Example) -> str:
    completions = (
        f"{plain(arm)}, {'correct' if each['correct'] else 'incorrect'}:\n\n{fenced(each['text'])}"
        for arm, each in example.completions.items()
    )
    about = f"**{example.kind}**: target {plain(example.target)}"
    return "\n\n".join([about, fenced(example.prompt), *completions])


def plain(text: str) -> str:
    """Return text in one line, escaped so that Markdown shows it literally.

    >>> plain("a|b <c> *d*")
    'a\\\\|b &lt;c&gt; \\\\*d\\\\*'
    """
    line = (
        printable(" ".join(text.split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    # A zero-width space keeps @name from notifying that user.
    return re.sub(r"([\\|`*_\[\]#~])", r"\\\1", line).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """Return text as a code block, with a fence longer than any inside it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable(text.rstrip())}\n{fence}"
