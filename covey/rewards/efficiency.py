"""Efficiency: few steps, few words, nothing said twice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.score import Score
from covey.rewards.text import count_words
from covey.types import Prompt

PHRASE = 6
"""How many words in a row make a phrase: long enough that ordinary prose seldom says one twice."""
MIN_WORDS = 24
"""Fewer words than this have no share of repeated phrases worth the name."""
MAX_REPETITION = 0.3
READ = 40_000
"""Of a text longer than twice as many characters, so many at the beginning and at the end count."""

# A point before a digit is part of a number or of a version.
_SENTENCE_END = re.compile(r"\.(?!\d)|[!?\n\u2026\u3002\uff01\uff0e\uff1f\uff61]")
# A long word is cut into pieces, so that `hahaha...` has phrases too; each character of a script
# without spaces is a word.
_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
    r"|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]"
)


def sentences(text: str) -> list[str]:
    """Return the sentences of more than 5 characters, in lower case and with single blanks.

    >>> sentences("Pi is 3.14159. So the area is 12.5!")
    ['pi is 3.14159', 'so the area is 12.5']
    """
    pieces = (" ".join(piece.casefold().split()) for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if len(piece) > 5]


def _repeated(units: list[str] | list[tuple[str, ...]]) -> float:
    return (len(units) - len(set(units))) / len(units)


def repetition(text: str, above: float = 0.0) -> float:
    """Return the share of a text that it has said before, in [0, 1].

    That is the larger of two shares: of sentences that are not the first of their kind, where there
    are more than 3; and of phrases of 6 words or signs, where there are at least 24. The second
    finds padding that has no sentence marks, or that varies where sentences are cut. A share of
    phrases that is easily seen to be no larger than `above` is not counted.

    >>> repetition("so it is " * 50) > 0.9, repetition("A plain sentence. And another one.")
    (True, 0.0)
    """
    if len(text) > 2 * READ:
        text = f"{text[:READ]}\n{text[-READ:]}"
    share = 0.0
    if len(_SENTENCE_END.findall(text)) >= 3:
        said = sentences(text)
        share = _repeated(said) if len(said) > 3 else 0.0
    tokens = _TOKEN.findall(text.casefold()) if len(text) >= MIN_WORDS else []
    # With every new token a new phrase begins, but for those too near to the end.
    if len(tokens) >= MIN_WORDS and len(tokens) - len(set(tokens)) > above * (len(tokens) - PHRASE):
        phrases = list(zip(*(islice(tokens, i, None) for i in range(PHRASE)), strict=False))
        share = max(share, _repeated(phrases))
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """1 - 0.1 for each step above `expected_steps` (0.5 at most) - length - repetition; at least 0.

    A step is a `<tool_call>`. Length takes 0.3 times the share by which the words exceed
    `max_words`, at most 0.3; repetition takes 0.2 where more than 30 % is said twice.

    Parts: 1 where nothing is taken off, 0 where the most is.
    """

    expected_steps: int = 3
    max_words: int = 512

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.expected_steps < 0:
            raise ConfigError(
                f"reward: expected_steps must be 0 or more, not {self.expected_steps}"
            )
        if self.max_words < 1:
            raise ConfigError(f"reward: max_words must be at least 1, not {self.max_words}")

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        extra_steps = max(0, text.count("<tool_call>") - self.expected_steps)
        excess = max(0, count_words(text) - self.max_words) / self.max_words
        steps, length = min(5, extra_steps) / 5, min(1.0, excess)
        repeats = float(repetition(text) > MAX_REPETITION)
        reward = max(0.0, 1.0 - (5 * steps + 3 * length + 2 * repeats) / 10)
        return Score(
            reward=reward,
            success=reward == 1.0,
            parts={"steps": 1.0 - steps, "length": 1.0 - length, "repetition": 1.0 - repeats},
        )
