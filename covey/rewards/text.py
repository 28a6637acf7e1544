"""Reading answers. Every function takes time linear in the text, however hostile it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Neither do underscores make one word of many, nor is a wall of digits one.
_LETTERS = r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
    rf"|{_LETTERS}+\d{{0,24}}|\d{{1,24}}{_LETTERS}*"
)


def inside(text: str, tag: str) -> list[str]:
    """Return what stands between each `<tag>` and the `</tag>` that follows it.

    >>> inside("<a>1</a> <a>2</a> <a>3", "a")
    ['1', '2']
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    found: list[str] = []
    start = text.find(opening)
    while start >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found.append(text[start:end])
        start = text.find(opening, end)
    return found


def differ(answers: Iterable[str]) -> bool:
    """Tell whether there are different ones among several answers: then none has been given.

    >>> differ(["7", " 7 "]), differ(["7", "8"])
    (False, True)
    """
    return len({answer.strip() for answer in answers}) > 1


def after_thinking(text: str) -> str:
    """Return what follows the thinking. Where thinking was begun and not ended, that is nothing.

    >>> after_thinking("<think>3 or 4?</think> 4"), after_thinking("<think>4")
    (' 4', '')
    """
    for tag in ("think", "reasoning"):
        _, closing, rest = text.rpartition(f"</{tag}>")
        if closing:
            return "" if f"<{tag}>" in rest else rest
        if f"<{tag}>" in text:
            return ""
    return text


def count_words(text: str) -> int:
    """Count words; scripts without spaces count a word a character.

    >>> count_words("five small words, don't: 我们"), count_words("x = 3.5")
    (7, 3)
    """
    return sum(1 for _ in _WORD.finditer(text))


def parted(text: str, tags: tuple[str, ...]) -> tuple[list[str], list[str]] | None:
    """Split at tags that each open and close once, in this order: (around them, inside them).

    None where a tag is missing, repeated, nested or out of order.

    >>> parted("<a>1</a> <b>2</b>.", ("a", "b"))
    (['', ' ', '.'], ['1', '2'])
    """
    around: list[str] = []
    within: list[str] = []
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return None
        start, end = text.find(opening, at), text.find(closing, at)
        if not 0 <= start < end:
            return None
        around.append(text[at:start])
        within.append(text[start + len(opening) : end])
        at = end + len(closing)
    return [*around, text[at:]], within
