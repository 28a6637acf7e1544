"""Escapes text so that Markdown shows the text literally."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from covey.escape import printable


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


def literal(value: object) -> Markup:
    """Return a value for a Markdown template; markup stays unchanged, other text is escaped."""
    return value if isinstance(value, Markup) else Markup(plain(str(value)))


def fenced(text: str) -> Markup:
    """Return text as a code block, with a fence that is longer than any fence in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}\n{printable(text.rstrip())}\n{fence}")


# A table of text, which all report formats can show.


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text; the first column has the names of the rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
