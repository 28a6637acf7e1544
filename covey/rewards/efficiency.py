"""The efficiency reward: penalties for repetition and for too many tool calls or words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from covey.rewards.score import Reward, Score, check_option
from covey.rewards.text import count_words
from covey.types import Prompt, episode_of

PHRASE = 6
"""Number of words in a phrase. Ordinary prose seldom repeats a sequence of 6 words."""
MIN_WORDS = 24
"""Repeated phrases are not counted in a text with fewer than MIN_WORDS words."""
MAX_REPETITION = 0.3
READ = 40_000
"""In a long text, only the first and the last READ characters are checked for repetition."""

# A point before a digit belongs to a number or a version.
_SENTENCE_END = re.compile(r"\.(?!\d)|[!?\n\u2026\u3002\uff01\uff0e\uff1f\uff61]")
# Long words are split, so that `hahaha...` has phrases too. In scripts without spaces each
# character is a word.
_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
    r"|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]"
)


def sentences(text: str) -> list[str]:
    """Return a text's sentences of more than 5 characters, in lower case.

    >>> sentences("Pi is 3.14159. So the area is 12.5!")
    ['pi is 3.14159', 'so the area is 12.5']
    """
    pieces = (" ".join(piece.casefold().split()) for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if len(piece) > 5]


def _repeated(units: list[str] | list[tuple[str, ...]]) -> float:
    return (len(units) - len(set(units))) / len(units)


def repetition(text: str, above: float = 0.0) -> float:
    """Return the fraction of a text that repeats earlier text, in [0, 1].

    The fraction is computed for sentences and for phrases, and the larger of these two fractions is
    returned. A phrase is a sequence of 6 words or punctuation marks. Repeated sentences count only
    in a text with more than 3 sentences. Repeated phrases count only in a text with at least 24
    words and punctuation marks. Counting phrases detects padding without punctuation, and padding
    in which only the ends of the sentences differ. To save time, phrases are not counted if the
    fraction of repeated phrases cannot exceed `above`.

    >>> repetition("so it is " * 50) > 0.9, repetition("A plain sentence. And another one.")
    (True, 0.0)
    """
    if len(text) > 2 * READ:
        text = f"{text[:READ]}\n{text[-READ:]}"
    share = 0.0
    if len(_SENTENCE_END.findall(text)) >= 3:
        found = sentences(text)
        share = _repeated(found) if len(found) > 3 else 0.0
    tokens = _TOKEN.findall(text.casefold()) if len(text) >= MIN_WORDS else []
    # Each new token starts a new phrase, unless it is too close to the end.
    if len(tokens) >= MIN_WORDS and len(tokens) - len(set(tokens)) > above * (len(tokens) - PHRASE):
        phrases = list(zip(*(islice(tokens, i, None) for i in range(PHRASE)), strict=False))
        share = max(share, _repeated(phrases))
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(Reward):
    """1 minus penalties for repetition and for too many tool calls or words, but at least 0.

    Each `<tool_call>` beyond the first `expected_steps` lowers the reward by 0.1. In a multi-turn
    episode, each edit beyond the first `expected_edits` and each policy turn beyond the first
    `max_rounds` costs 0.1. An edit is a call of one of the `edit_tools`. The penalties for calls,
    edits and turns are together at most 0.5.

    A completion of more than `max_words` words loses `0.3 * (words - max_words) / max_words`, but
    at most 0.3. A completion with more than 30 % repeated text loses 0.2.

    Each reward part is 1 without a penalty, and 0 with the maximum penalty.
    """

    expected_steps: int = 3
    max_words: int = 512
    expected_edits: int = 0
    """Number of edits without a penalty. The value 0 disables the penalty for edits."""
    max_rounds: int = 0
    """Number of policy turns without a penalty. The value 0 disables the penalty for turns."""
    edit_tools: tuple[str, ...] = ("edit", "rewrite", "write_file", "str_replace", "apply_patch")

    def __post_init__(self) -> None:
        for name in ("expected_steps", "expected_edits", "max_rounds"):
            value = getattr(self, name)
            check_option(value >= 0, f"{name} must be 0 or more, not {value}")
        check_option(self.max_words >= 1, f"max_words must be at least 1, not {self.max_words}")

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        extra_steps = max(0, text.count("<tool_call>") - self.expected_steps)
        excess = max(0, count_words(text) - self.max_words) / self.max_words
        more = self._more(text)
        steps = min(5, extra_steps + sum(more.values())) / 5
        length = min(1.0, excess)
        repeats = float(repetition(text) > MAX_REPETITION)
        reward = max(0.0, 1.0 - (5 * steps + 3 * length + 2 * repeats) / 10)
        return Score(
            reward=reward,
            success=reward == 1.0,
            parts={"steps": 1.0 - steps, "length": 1.0 - length, "repetition": 1.0 - repeats}
            | {name: 1.0 - min(5, count) / 5 for name, count in more.items()},
        )

    def _more(self, text: str) -> dict[str, int]:
        """Return by how much the edits and turns exceed their limits. A limit of 0 means no
        limit."""
        episode = episode_of(text)
        edits, rounds = 0, 1
        if episode is not None:
            functions = [call.get("function") for call in episode.tool_calls]
            edits = sum(
                isinstance(function, Mapping) and function.get("name", "") in self.edit_tools
                for function in functions  # a malformed call has no function
            )
            rounds = sum(message["role"] == "assistant" for message in episode.reply)
        counted = {"edits": (edits, self.expected_edits), "rounds": (rounds, self.max_rounds)}
        return {name: max(0, n - most) for name, (n, most) in counted.items() if most}
