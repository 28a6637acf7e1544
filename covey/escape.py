"""Escape control characters in text that a terminal or a web page shows.

Prompts, completions, data, configs, run names and server replies are untrusted text. Control
characters in untrusted text could control a terminal, and bidirectional overrides could reorder the
text of a web page. Like Git, Covey shows control characters as visible escapes. Stored text and
JSON output stay unescaped.
"""

from __future__ import annotations

import unicodedata
from typing import Any

LAYOUT = "\n\t"
"""The control characters that Covey does not escape: line break and tab."""
JOINERS = "\u200c\u200d"
"""Zero-width joiner and non-joiner, which Covey does not escape, because some scripts need them."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories to escape: control, format, surrogate, line and paragraph separator."""


def is_hidden(character: str) -> bool:
    """Return whether a character is invisible and must be escaped."""
    return unicodedata.category(character) in HIDDEN and character not in LAYOUT + JOINERS


class _Escapes(dict[int, str]):
    """A table for `str.translate` that computes the escape of a character on first use."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        self[code] = sign.encode("unicode_escape").decode() if is_hidden(sign) else sign
        return self[code]


_ESCAPES = _Escapes()


def printable(text: str) -> str:
    r"""Return a text with its invisible characters replaced by visible escapes.

    >>> print(printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return text.translate(_ESCAPES)


def printable_line(text: str, most: int = 500) -> str:
    r"""Return an escaped text as one line, cut after `most` characters.

    >>> print(printable_line("a\n  b\x00" + "c" * 9, 8))
    a b\x00c ...
    """
    line = " ".join(text[: 4 * most].split())
    escaped = printable(line[: most + 1])
    return escaped if len(escaped) <= most else f"{escaped[:most]} ..."


def printable_data(value: Any) -> Any:
    """Return a copy of nested dicts and lists in which all text is escaped."""
    if isinstance(value, dict):
        return {printable_data(key): printable_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        # Most long lists are numbers.
        return [each if type(each) is float else printable_data(each) for each in value]
    return printable(value) if isinstance(value, str) else value
