"""Find tags, thinking and words in the text of a completion, and shorten long texts.

Every function of this module takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Underscores do not join words, and a long run of digits is several words.
_LETTERS = r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
    rf"|{_LETTERS}+\d{{0,24}}|\d{{1,24}}{_LETTERS}*"
)
URL = re.compile(r"https?://[^\s<>\"'`{}|\\^]+", re.IGNORECASE)
DOI = re.compile(r"\b10\.\d{4,9}/[^\s<>\"'`]+")
ARXIV = re.compile(
    r"arxiv(?:\.org/(?:abs|pdf|html)/|:\s{0,3}|\s{1,3})(\d{4}\.\d{4,5}|[a-z-]{2,12}/\d{7})",
    re.IGNORECASE,
)
# Each pattern, with a literal that all its matches contain. URLs come first: they may contain DOIs.
ADDRESSES = ((URL, "://"), (DOI, "10."), (ARXIV, "arxiv"))


def tag_contents(text: str, tag: str) -> list[str]:
    """Return the text between each `<tag>` and the next `</tag>`.

    >>> tag_contents("<a>1</a> <a>2</a> <a>3", "a")
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


def nesting(text: str) -> int:
    """Return how deeply brackets are nested in a text.

    >>> nesting("f([1, 2], {})")
    2
    """
    depth = deepest = 0
    for bracket in re.findall(r"[][(){}]", text):
        depth = max(0, depth + (1 if bracket in "[({" else -1))
        deepest = max(deepest, depth)
    return deepest


def answers_differ(answers: Iterable[str]) -> bool:
    """Return whether a completion's answers differ, in which case rewards accept none of them.

    >>> answers_differ(["7", " 7 "]), answers_differ(["7", "8"])
    (False, True)
    """
    return len({answer.strip() for answer in answers}) > 1


def after_thinking(text: str) -> str:
    """Return the text after the thinking, or "" if the thinking has no closing tag.

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
    """Count the words of a text. Each Chinese, Japanese or Korean character counts as a word.

    >>> count_words("five small words, don't: 我们"), count_words("x = 3.5")
    (7, 3)
    """
    return sum(1 for _ in _WORD.finditer(text))


def split_tags(text: str, tags: tuple[str, ...]) -> tuple[list[str], list[str]] | None:
    """Return the texts outside the given tags, and the tags' contents.

    Each tag must occur exactly once, in the given order. Return None if a tag is missing, repeated,
    nested or out of order.

    >>> split_tags("<a>1</a> <b>2</b>.", ("a", "b"))
    (['', ' ', '.'], ['1', '2'])
    """
    outside: list[str] = []
    contents: list[str] = []
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return None
        start, end = text.find(opening, at), text.find(closing, at)
        if not 0 <= start < end:
            return None
        outside.append(text[at:start])
        contents.append(text[start + len(opening) : end])
        at = end + len(closing)
    return [*outside, text[at:]], contents


def only_tags(text: str, tags: tuple[str, ...]) -> list[str] | None:
    """Return the contents of the given tags, or None if the text contains anything else.

    Each tag must occur exactly once, in the given order, and must not be empty.

    >>> only_tags("<a>1</a> <b>2</b>", ("a", "b")), only_tags("<a>1</a>.", ("a",))
    (['1', '2'], None)
    """
    found = split_tags(text, tags)
    if found is None or "".join(found[0]).strip() or not all(map(str.strip, found[1])):
        return None
    return found[1]


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text that is longer than `most` characters.

    >>> shortened("0123456789", 4)
    '01\\n[6 characters left out]\\n89'
    """
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[len(text) - (most - most // 2) :]
    return f"{head}\n[{len(text) - most} characters left out]\n{tail}"


def without_addresses(text: str) -> str:
    """Return a text without its URLs, DOIs and arXiv numbers.

    >>> without_addresses("See https://a.org/b here")
    'See   here'
    """
    for pattern, literal in ADDRESSES:
        if literal in text.lower():
            text = pattern.sub(" ", text)
    return text
