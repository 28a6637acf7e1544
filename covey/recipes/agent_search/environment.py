"""The `search` environment: the policy searches documents with BM25 and cites them."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from covey.environments.environment import Start, Step
from covey.environments.tool_environment import ToolEnvironment, ToolError
from covey.errors import ConfigError, DataError, nearest, reason
from covey.recipes.agent_book.citations import Citations
from covey.recipes.agent_search import library
from covey.rewards.text import shortened
from covey.rewards.text_match import ExactText
from covey.types import Message, Prompt

ENDINGS = (".md", ".rst", ".txt")
LARGEST = 10 << 20
"""Maximum size of a document in bytes; a larger file raises an error."""
ANSWER, CITATIONS = 0.7, 0.3
"""Maximum reward for a correct answer, and maximum reward for citations; the sum is 1."""


@cache
def read_documents(folder: str) -> dict[str, str]:
    """Map the id of each document in a folder and its subfolders to the document's text.

    The id of a document is its path in the folder, without the file extension. An empty `folder`
    means the built-in documents.
    """
    if not folder:
        return library.documents()
    found: dict[str, str] = {}
    try:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in ENDINGS and path.is_file():
                if path.stat().st_size > LARGEST:
                    raise DataError(
                        f"environment: {path} is larger than {LARGEST} bytes; split the file"
                    )
                name = path.relative_to(folder).with_suffix("").as_posix()
                found[name] = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"environment: cannot read {folder}: {reason(error)}") from None
    if not found:
        endings = " or ".join(ENDINGS)
        raise ConfigError(
            f"environment: folder = {folder!r} has no files whose names end in {endings}"
        )
    return found


@cache
def _index_of(folder: str) -> Index:
    return Index(read_documents(folder))


class Search(ToolEnvironment):
    """An environment with tools that search and read documents; the last turn is the answer.

    If the prompt has `info["sources"]`, a correct answer earns 0.7, and citations earn up to 0.3
    more. To earn the full 0.3 for citations, the answer must cite every document in
    `info["sources"]`. The policy cites a document by writing the document's id in square brackets.
    A citation counts only if a tool has shown the document in this episode. A citation of a
    document that no tool has shown, or that is not in `info["sources"]`, subtracts a quarter of the
    maximum reward for citations. Without `info["sources"]`, a correct answer earns 1.
    """

    def __init__(
        self,
        *,
        folder: str = "",
        results: int = 3,
        snippet_chars: int = 200,
        document_chars: int = 4000,
    ) -> None:
        for name, value in (
            ("results", results),
            ("snippet_chars", snippet_chars),
            ("document_chars", document_chars),
        ):
            if not 1 <= value <= 20_000:
                raise ConfigError(f"environment: {name} = {value} must be from 1 to 20000")
        self._folder = os.path.abspath(folder) if folder else ""
        self._documents, self._index = read_documents(self._folder), _index_of(self._folder)
        self._results = results
        self._snippet_chars, self._document_chars = snippet_chars, document_chars
        self._prompt: Prompt | None = None
        self._shown: set[str] = set()
        self._answer = ""

    def reset(self, prompt: Prompt, seed: int) -> Start:
        self._prompt = prompt
        return super().reset(prompt, seed)

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        self._answer = message["content"] if step.done else ""
        return step

    def search(self, query: str) -> str:
        """Find the documents that share the most telling words with a query.

        Args:
            query: A few words.
        """
        found = self._index.best(query, self._results)
        self._shown.update(found)
        lines = [f"[{name}] {_snippet(self._documents[name], query, self._snippet_chars)}"
                 for name in found]  # fmt: skip
        return "\n".join(lines) or "nothing found"

    def read(self, document: str) -> str:
        """Return the text of a document.

        Args:
            document: Its id, as a search shows it in square brackets.
        """
        name = document.strip().removeprefix("[").removesuffix("]")
        if name not in self._documents:
            raise ToolError(f"there is no document {name!r}{nearest(name, self._documents)}")
        self._shown.add(name)
        return shortened(self._documents[name], self._document_chars)

    def reward(self) -> dict[str, float]:
        assert self._prompt is not None
        correct = ExactText(ignore_case=True, ignore_punctuation=True)(self._prompt, self._answer)
        wanted = self._prompt.info.get("sources")
        if not wanted:
            return {"answer": correct.reward}
        cited = 0.0
        if shown := [name for name in wanted if name in self._shown]:
            seen = replace(self._prompt, info={**self._prompt.info, "sources": shown})
            cited = Citations(minimum=len(wanted))(seen, self._answer).reward
        return {
            "answer": ANSWER * correct.reward,
            "citations": CITATIONS * cited,
        }


def _snippet(text: str, query: str, most: int) -> str:
    """Return one line of text around the longest query word that occurs in a document."""
    flat = " ".join(text.split())
    folded = flat.casefold()
    places = [folded.find(word) for word in sorted(words(query), key=len)]
    place = next((at for at in reversed(places) if at >= 0), 0)
    start = max(0, min(place - most // 4, len(flat) - most))
    return f"{'...' * (start > 0)}{flat[start : start + most]}{'...' * (start + most < len(flat))}"


# BM25: ranks documents by the words that they share with a query.
#
#   score(d, q) = sum over words w of q:  idf(w) * f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))
#   idf(w)      = ln(1 + (N - n + 0.5) / (n + 0.5))
#
# Here f is the count of word w in document d, |d| the number of words in d, N the number of
# documents, and n the number of documents with word w. Lucene uses the same formula.

K1, B = 1.5, 0.75
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class Index:
    """A BM25 index of documents, which maps each word to the documents with the word."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self._places: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._lengths: dict[str, int] = {}
        for name, text in documents.items():
            found = words(text)
            self._lengths[name] = len(found)
            for word, count in Counter(found).items():
                self._places[word].append((name, count))
        self._mean = sum(self._lengths.values()) / max(1, len(self._lengths)) or 1.0

    def scores(self, query: str) -> dict[str, float]:
        scores: dict[str, float] = defaultdict(float)
        size = len(self._lengths)
        for word, times in Counter(words(query)).items():
            places = self._places.get(word, ())
            idf = math.log(1 + (size - len(places) + 0.5) / (len(places) + 0.5))
            for name, count in places:
                length = 1 - B + B * self._lengths[name] / self._mean
                scores[name] += times * idf * count * (K1 + 1) / (count + K1 * length)
        return dict(scores)

    def best(self, query: str, most: int) -> list[str]:
        """Return the ids of the documents with the highest scores; equal scores sort by id."""
        scores = self.scores(query)
        return sorted(scores, key=lambda name: (-scores[name], name))[:most]
