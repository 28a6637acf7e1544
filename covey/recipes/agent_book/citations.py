"""The citations reward: the number of different sources that a completion cites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from covey.rewards.score import Reward, Score, check_option
from covey.rewards.text import ADDRESSES, ARXIV, DOI, URL, after_thinking, count_words
from covey.types import Prompt

_HOST = re.compile(r"[\w-]+(?:\.[\w-]+)+(?::\d+)?")
_MARK = r"\^?[\w.:-]{1,40}"
_MARKS = re.compile(rf"\[(?<!\w\[)({_MARK}(?:\s{{0,3}}[,;]\s{{0,3}}{_MARK}){{0,20}})\](?!\()")
_ENTRY = re.compile(r"[ \t]*(?:[-*] )?\[\^?(\d{1,3})\]:?[ \t]+(\S.*)")
_NUMBERED = re.compile(r"[ \t]*(\d{1,3})[.)][ \t]+(\S.*)")
_HEADING = re.compile(
    r"\W*(?:references|sources|bibliography|works cited|citations|参考文献|参考资料|来源)\W*",
    re.IGNORECASE,
)
_CLOSING = ".,;:!?*_~\u3002\uff0c\uff1b\uff01\uff1f"
_BRACKETS = {")": "(", "]": "["}


def _trim(address: str) -> str:
    """Remove trailing punctuation and unmatched closing brackets from a URL or DOI."""
    for _ in range(8):
        address = address.rstrip(_CLOSING)
        opening = _BRACKETS.get(address[-1:])
        if opening is None or address.count(opening) >= address.count(address[-1]):
            break
        address = address[:-1]
    return address


def _key(address: str) -> str | None:
    """Return the normalized form of a URL, DOI or arXiv number, or None for any other text."""
    arxiv = ARXIV.search(address)
    if arxiv:
        return f"arxiv:{arxiv[1].lower()}"
    doi = DOI.search(address)
    if doi:
        return f"doi:{_trim(doi[0]).lower()}"
    if not URL.fullmatch(address):
        return None
    address, _, _ = _trim(address).partition("#")
    host, slash, path = address.partition("://")[2].partition("/")
    if not _HOST.fullmatch(host):
        return None
    return f"{host.lower().removeprefix('www.')}{slash}{path}".rstrip("/")


def addresses(text: str) -> set[str]:
    """Return the URLs, DOIs and arXiv numbers in a text, each in normalized form.

    The normalized form omits the scheme, `www.`, the fragment, closing punctuation, trailing
    slashes and the version of an arXiv paper.

    >>> sorted(addresses("See https://www.a.org/b/#c, http://a.org/b and arXiv:2402.03300v2."))
    ['a.org/b', 'arxiv:2402.03300']
    """
    # Every match is removed from the text, because a DOI inside a URL is not a second source.
    found: set[str | None] = set()
    for pattern, literal in ADDRESSES:
        if literal in text.lower():
            found |= set(map(_key, {match[0] for match in pattern.finditer(text)}))
            text = pattern.sub(" ", text)
    return {key for key in found if key is not None}


def _marks(text: str) -> set[str]:
    """Return the citation marks in square brackets, such as `[3]`, `[1, 2]`, `[1-3]`, `[doc7]`."""
    marks: set[str] = set()
    for group in set(_MARKS.findall(text)):
        for mark in re.split(r"\s*[,;]\s*", group):
            first, dash, last = mark.removeprefix("^").partition("-")
            if dash and first.isdecimal() and last.isdecimal() and int(last) - int(first) < 20:
                marks |= {str(number) for number in range(int(first), int(last) + 1)}
            else:
                marks.add(mark.removeprefix("^"))
    return marks


def _split_entries(text: str) -> tuple[str, dict[str, str]]:
    """Split a text into its body and the numbered entries of its list of sources."""
    body: list[str] = []
    entries: dict[str, str] = {}
    listed = False
    for line in text.splitlines():
        entry = _ENTRY.fullmatch(line) if "[" in line else None
        if listed:
            entry = entry or _NUMBERED.fullmatch(line)
        elif entry is None and len(line) < 60:
            listed = _HEADING.fullmatch(line) is not None
        if entry:
            entries[entry[1]] = entry[2]
        else:
            body.append(line)
    return "\n".join(body), entries


def sources(text: str) -> set[str]:
    """Return the distinct sources that a text cites, each in normalized form.

    A URL, DOI or arXiv number is a citation wherever it occurs in the text. A citation mark such as
    `[1]` cites entry 1 in the text's list of sources. A citation mark that cites no entry is
    ignored. An entry in the list of sources is a line `[1] ...`, or a line `1. ...` under a heading
    such as References. An entry is identified by its URL, DOI or arXiv number. An entry without a
    URL, DOI or arXiv number is identified by its title, which must have at least three words.
    """
    body, entries = _split_entries(text)
    found = addresses(text)
    for mark in _marks(body):
        entry = entries.get(mark, "")
        if not addresses(entry) and count_words(entry[:500]) >= 3:
            found.add("title:" + " ".join(re.findall(r"\w+", entry[:500].casefold())))
    return found


def _shape(name: str) -> str:
    return re.sub(r"\d+", "0", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Citations(Reward):
    """The number of different sources cited in the text after the thinking, divided by `minimum`.

    The reward is at most 1, and a completion with at least `minimum` sources is a success. A source
    is a URL, a DOI or an arXiv number. An entry in a list of sources counts if a citation mark such
    as [1] cites the entry. A repeated source counts once.

    `prompt.info["sources"]` may list URLs, DOIs, arXiv numbers or ids such as `doc3`. If
    `prompt.info["sources"]` exists, only the sources in this list count. A citation mark `[doc3]`
    cites the source with the id `doc3`. Each cited URL, DOI or arXiv number that is not listed
    lowers the reward by `unknown_penalty`. A citation mark such as `[doc9]`, which differs from a
    listed id only in its number, also lowers the reward by `unknown_penalty`.
    """

    minimum: int = 2
    unknown_penalty: float = 0.25

    def __post_init__(self) -> None:
        check_option(self.minimum >= 1, f"minimum must be at least 1 source, not {self.minimum}")
        check_option(
            0 <= self.unknown_penalty <= 1,
            f"unknown_penalty must be between 0 and 1, not {self.unknown_penalty}",
        )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        text = after_thinking(text)
        allowed = prompt.info.get("sources")
        if allowed is None:
            known, unknown = len(sources(text)), 0
        else:
            known, unknown = _count_cited(text, _allowed(prompt, allowed))
        share = min(1.0, known / self.minimum)
        return Score(
            reward=max(0.0, share - self.unknown_penalty * unknown),
            success=known >= self.minimum,
            parts={"sources": float(known), "unknown": float(unknown)},
        )


def _allowed(prompt: Prompt, listed: object) -> set[str]:
    if isinstance(listed, str) or not isinstance(listed, Iterable) or not list(listed):
        raise ValueError(
            f"prompt {prompt.id}: info['sources'] must list addresses or ids, not {listed!r}"
        )
    return {_key(str(source)) or str(source) for source in listed}


def _count_cited(text: str, allowed: set[str]) -> tuple[int, int]:
    body, _ = _split_entries(text)
    shapes = {_shape(name) for name in allowed}
    marks = {mark for mark in _marks(body) if _shape(mark) in shapes}
    # An id may contain spaces, which the pattern of marks does not match.
    marks |= {name for name in allowed if f"[{name}]" in body}
    cited = addresses(text) | marks
    return len(cited & allowed), len(cited - allowed)
