"""Text rewards: exact match with the target, or similarity to the target."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from covey.rewards.extract import extract_text
from covey.rewards.score import Score, TargetReward, check_option
from covey.types import Prompt

MAX_TEXT = 100_000
MAX_COMPARED = 2000


def _targets(prompt: Prompt) -> list[str]:
    others = prompt.info.get("answers", ())
    given = [prompt.target, *(others if isinstance(others, list | tuple) else [others])]
    return [stripped for text in given if (stripped := str(text).strip())]


def _missing(prompt: Prompt) -> str:
    return f"prompt {prompt.id!r} has neither a target nor info['answers']"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactText(TargetReward):
    """1 if the final answer is the target or one of `prompt.info["answers"]`, otherwise 0.

    The final answer is the content of `<answer>` after the thinking or, without this tag, all text
    after the thinking. Whitespace around the final answer is ignored.
    """

    ignore_case: bool = False
    ignore_blanks: bool = True
    """Whether any amount of whitespace between words counts as one space."""
    ignore_punctuation: bool = False

    def __call__(self, prompt: Prompt, text: str) -> Score:
        targets = _targets(prompt)
        if not targets:
            return self.neutral(_missing(prompt), ("accuracy",))
        answer = extract_text(text)
        folded = self._folded(answer)
        # Without punctuation, "?" is empty, and an empty answer is never correct.
        success = answer in targets or (bool(folded) and folded in map(self._folded, targets))
        return Score(
            reward=float(success),
            success=success,
            parts={"accuracy": float(success)},
            attempted=bool(answer),
        )

    def _folded(self, text: str) -> str | None:
        if len(text) > MAX_TEXT:
            return None
        if self.ignore_punctuation:
            text = re.sub(r"[^\w\s]|_", "", text)
        if self.ignore_case:
            text = text.casefold()
        return " ".join(text.split()) if self.ignore_blanks else text.strip()


def word_overlap(answer: Iterable[str], target: Iterable[str]) -> float:
    """Return the F1 score of the words in two texts.

    The F1 score is `2 * s / t`, where s is the number of shared words, and t is the sum of the word
    counts of both texts. The order of the words does not matter.

    >>> word_overlap(["the", "red", "fox"], ["red", "fox"])
    0.8
    """
    one, other = Counter(answer), Counter(target)
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0


def letter_similarity(answer: str, target: str) -> float:
    """Return the similarity of two texts, from 0 to 1, by their longest common subsequence.

    The similarity is `2 * L / (m + n)`, where m and n are the lengths of the texts, and L is the
    length of their longest common subsequence. L is computed with the bit-parallel algorithm of
    Hyyrö (2004), which stores each row of the dynamic-programming table in one integer.

    >>> letter_similarity("kitten", "sitting")
    0.6153846153846154
    """
    if not answer and not target:
        return 1.0
    places: dict[str, int] = {}
    for at, letter in enumerate(answer):
        places[letter] = places.get(letter, 0) | 1 << at
    full = row = (1 << len(answer)) - 1
    for letter in target:
        matches = row & places.get(letter, 0)
        row = ((row + matches) | (row - matches)) & full
    return 2 * (len(answer) - row.bit_count()) / (len(answer) + len(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzyText(TargetReward):
    """The highest similarity of the final answer to the target or one of `info["answers"]`.

    The similarity is the mean of `word_overlap` and `letter_similarity`, and ignores case and
    whitespace. Only the first 2,000 characters of the answer and of the target are compared. If the
    lengths differ, the similarity is multiplied by `shorter length / longer length`, so that
    padding never helps. The final answer is extracted as in `ExactText`.
    """

    threshold: float = 0.9
    """A completion is a success if its similarity is at least this threshold."""

    def __post_init__(self) -> None:
        TargetReward.__post_init__(self)
        check_option(
            0 < self.threshold <= 1, f"threshold = {self.threshold} must be above 0 and at most 1"
        )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        targets = _targets(prompt)
        if not targets:
            return self.neutral(_missing(prompt), ("similarity", "words", "letters"))
        answer = extract_text(text)
        reward, words, letters = max(self._compare(answer, t) for t in targets)
        return Score(
            reward=reward,
            success=reward >= self.threshold,
            parts={"similarity": reward, "words": words, "letters": letters},
            attempted=bool(answer),
        )

    def _compare(self, answer: str, target: str) -> tuple[float, float, float]:
        lengths = sorted((len(answer), len(target)))
        scale = lengths[0] / lengths[1] if lengths[1] > MAX_COMPARED else 1.0
        a, b = (" ".join(t[:MAX_COMPARED].casefold().split()) for t in (answer, target))
        words = scale * word_overlap(re.findall(r"\w+", a), re.findall(r"\w+", b))
        letters = scale * letter_similarity(a, b)
        return (words + letters) / 2, words, letters
