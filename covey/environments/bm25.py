"""BM25: ranks documents by the words that they share with a query.

    score(d, q) = sum over words w of q:  idf(w) * f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))
    idf(w)      = ln(1 + (N - n + 0.5) / (n + 0.5))

In the formula, f is the count of word w in document d, and |d| is the number of words in d. In the
formula, N is the number of documents, and n is the number of documents with word w. Lucene uses the
same formula for BM25.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

K1, B = 1.5, 0.75
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.casefold())


class Index:
    """An index of documents by the words that they contain."""

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
        """Return the score of each document that shares a word with the query."""
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
        """Return the names of the best documents, best first; ties are ordered by name."""
        scores = self.scores(query)
        return sorted(scores, key=lambda name: (-scores[name], name))[:most]
