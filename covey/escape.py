"""Escapes for control characters in text that a terminal or a web page shows.

Prompts, completions, data, configs, run names and server replies are untrusted text. Control
characters in untrusted text can control a terminal, and bidirectional overrides can reorder the
text of a web page. Covey shows control characters and bidirectional overrides as visible escapes,
as Git does. Covey does not escape stored text and JSON output.
"""

from __future__ import annotations

import unicodedata
from typing import Any

LAYOUT = "\n\t"
"""The control characters that Covey does not escape: line break and tab."""
JOINERS = "\u200c\u200d"
"""Format characters that some writing systems and emoji need; they do not reorder text."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories without a glyph: control, format, lone surrogates, separators."""


def is_hidden(character: str) -> bool:
    """Return whether a character is invisible and changes the text around it."""
    return unicodedata.category(character) in HIDDEN and character not in LAYOUT + JOINERS


class _Escapes(dict[int, str]):
    """A table for `str.translate` that adds entries on first use."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        self[code] = sign.encode("unicode_escape").decode() if is_hidden(sign) else sign
        return self[code]


_ESCAPES = _Escapes()


def printable(text: str) -> str:
    r"""Return text for a terminal or a web page, with hidden characters as visible escapes.

    >>> print(printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return text.translate(_ESCAPES)


def printable_line(text: str, most: int = 500) -> str:
    r"""Return text as one line of at most `most` characters.

    >>> print(printable_line("a\n  b\x00" + "c" * 9, 8))
    a b\x00c ...
    """
    line = " ".join(text[: 4 * most].split())
    escaped = printable(line[: most + 1])
    return escaped if len(escaped) <= most else f"{escaped[:most]} ..."


def printable_data(value: Any) -> Any:
    """Return a copy of plain data in which all text is escaped."""
    if isinstance(value, dict):
        return {printable_data(key): printable_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        # Most long lists are numbers.
        return [each if type(each) is float else printable_data(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def finite(value: Any) -> Any:
    """Return plain data with None in place of NaN and infinities, which JSON cannot represent."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
