"""Text as it may be shown: nothing in it moves a cursor, hides a word or turns a line around.

Prompts, completions, data, configurations, names of runs and what a server says are other people's
text. A terminal obeys the control characters in it, and a page obeys bidirectional overrides. They
are shown as escapes, as Git shows them. What is stored, and what JSON holds, stays as it is.
"""

from __future__ import annotations

import unicodedata
from typing import Any

LAYOUT = "\n\t"
"""Control characters that lay text out and do nothing else."""
JOINERS = "\u200c\u200d"
"""Format characters that some scripts and emoji are written with; they move nothing."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what has no glyph: control, format, lone surrogates, separators."""


def is_hidden(sign: str) -> bool:
    """Whether a character does something to the text around it rather than being seen."""
    return unicodedata.category(sign) in HIDDEN and sign not in LAYOUT + JOINERS


class _Escapes(dict[int, str]):
    """A table for `str.translate` that is filled as characters are met."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        self[code] = sign.encode("unicode_escape").decode() if is_hidden(sign) else sign
        return self[code]


_ESCAPES = _Escapes()


def printable(text: str) -> str:
    r"""Return text for a terminal or a page: what is hidden in it becomes a visible escape.

    >>> print(printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return text.translate(_ESCAPES)


def printable_line(text: str, most: int = 500) -> str:
    r"""Return text as one line of bounded length.

    >>> print(printable_line("a\n  b\x00" + "c" * 9, 8))
    a b\x00c ...
    """
    line = " ".join(text[: 4 * most].split())
    shown = printable(line[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]} ..."


def printable_data(value: Any) -> Any:
    """Return plain data with every text in it printable."""
    if isinstance(value, dict):
        return {printable_data(key): printable_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(each) for each in value]
    return printable(value) if isinstance(value, str) else value
