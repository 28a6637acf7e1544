"""Rewards of a right answer: in mathematics, to the letter, or nearly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.algebra import MAX_FORMULA, is_tame, require_algebra, same_by_algebra
from covey.rewards.equation import is_name, sides, stated_values, variables, without_unit
from covey.rewards.formula import same_formula
from covey.rewards.notation import exact_decimals, latex_signs, same_numeral
from covey.rewards.reading import (
    STYLES,
    check_styles,
    final_text,
    find_answer,
    normalise,
    read_number,
    without_dress,
)
from covey.rewards.score import Score
from covey.sandbox.scorer import LONGEST
from covey.types import Prompt

MAX_TEXT = 100_000
MAX_COMPARED = 2000
MAX_SUMS = 6
"""Sums in brackets: multiplied with each other they have up to 2 to this power terms."""
MAX_PARTS = 12
"""Of lists that only math-verify can compare, which tries every order."""

_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z ]*")
_SUM = re.compile(r"[({][^(){}]*[0-9A-Za-z)}] *[-+][^(){}]*[)}]")
_SET_AND_OTHER = ({r"\{", "("}, {r"\{", "["})
_TWO_NUMBERS = re.compile(r"(?:^|[^\w^])[0-9.]+ +[0-9]")


def _plain(formula: str) -> str:
    """Return a formula without its unit and its dress, in the signs that LaTeX has."""
    text = exact_decimals(latex_signs(normalise(formula)))
    return without_dress(without_unit(text))


def _is_short(formula: str) -> bool:
    return formula.count(",") < MAX_PARTS and len(_SUM.findall(formula)) <= MAX_SUMS


@dataclass(frozen=True, slots=True, kw_only=True)
class MathAnswer:
    """1 for an answer that equals the expected one, as a number or as a formula; otherwise 0.

    Numbers are compared exactly. `tolerance` is relative and holds only where the expected number
    is not whole: counts are right or wrong, and with 1 % on them every guess between 991 and 1009
    would be right for 1000, so that a policy learns to be roughly right.

    Formulas are compared, if `symbolic`, by trying values, and where that does not decide by
    math-verify. It sees the answer that was found and never the whole text, of which it would take
    the part that fits. A formula counts only where something marks it as the answer, because the
    style `number` finds nothing but numbers.

    A share of a hundred is not converted: `50%` is 50, and not 0.5.
    """

    styles: tuple[str, ...] = STYLES
    tolerance: float = 1e-6
    symbolic: bool = True
    unsafe: bool = False
    """Whether math-verify, which evaluates text, runs without isolation, as an ordinary process."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_styles(self.styles)
        if not 0 <= self.tolerance < 1:
            raise ConfigError(
                f"reward: tolerance = {self.tolerance} must be at least 0 and below 1"
            )
        if self.symbolic:
            require_algebra(self.unsafe)

    @property
    def longest(self) -> float:
        """Seconds: what math-verify gets for a pair of formulas."""
        return LONGEST if self.symbolic else 0.0

    @property
    def quick(self) -> bool:
        """Not with formulas: even tame ones may take long to compare."""
        return not self.symbolic

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        expected = find_answer(prompt.target, ("boxed", "hashes")) or prompt.target.strip()
        if not expected:
            raise ValueError(f"prompt {prompt.id!r} has no answer to compare with")
        given = find_answer(text, self.styles)
        right = given is not None and self._equal(given, expected)
        return Score(
            reward=float(right),
            success=right,
            parts={"accuracy": float(right), "found": float(given is not None)},
            attempted=given is not None,
        )

    def _equal(self, given: str, expected: str) -> bool:
        number, gold = read_number(given), read_number(expected)
        if number is not None and gold is not None:
            if gold.denominator == 1 or not self.tolerance:
                return number == gold  # a difference of fractions takes as long as all the rest
            return abs(number - gold) <= Fraction(self.tolerance) * abs(gold)
        if max(len(given), len(expected)) > MAX_FORMULA:
            return given == expected
        given, expected = map(_plain, (given, expected))
        if given.casefold() == expected.casefold() or not self.symbolic:
            return given.casefold() == expected.casefold()
        numerals = same_numeral(given, expected)
        if numerals is not None:
            return numerals
        stated, wanted = sides(given), sides(expected)
        if len(stated) > 1 and (len(wanted) == 1 or len(stated) > 2 or not variables(given)):
            return self._states(stated, wanted)
        return self._same_formula(given, expected)

    def _states(self, stated: list[str], wanted: list[str]) -> bool:
        """Whether every side of a chain of equalities that could be the target equals it."""
        if len(wanted) > 2 or (len(wanted) == 2 and not is_name(wanted[0])):
            return False
        values = stated_values(stated, wanted[-1])
        return bool(values) and all(self._equal(value, wanted[-1]) for value in values)

    def _same_formula(self, given: str, expected: str) -> bool:
        # As products of letters "seat" would be "east", and "17 18" a sum.
        if any(_WORDS.fullmatch(t) or _TWO_NUMBERS.search(t) for t in (given, expected)):
            return False
        if not is_tame(given) or not is_tame(expected):
            return False
        # To math-verify the set of two numbers is the interval between them.
        if {text[: 1 + (text[:1] == "\\")] for text in (given, expected)} in _SET_AND_OTHER:
            return False
        tried = same_formula(given, expected)
        if tried is None and all(map(_is_short, (given, expected))):
            return same_by_algebra(given, expected, self.unsafe)
        return bool(tried)


def _expected_texts(prompt: Prompt) -> list[str]:
    """Return the expected answer and `prompt.info["answers"]`, without blanks around."""
    others = prompt.info.get("answers", ())
    given = [prompt.target, *(others if isinstance(others, list | tuple) else [others])]
    texts = [stripped for text in given if (stripped := str(text).strip())]
    if not texts:
        raise ValueError(f"prompt {prompt.id!r} has neither an answer nor info['answers']")
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactText:
    """1 for the expected text, or one of `prompt.info["answers"]`; otherwise 0.

    The answer is what `<answer>` holds after the thinking, or all that follows it where there is
    none. Blanks around it never count.
    """

    ignore_case: bool = False
    ignore_blanks: bool = True
    """Any blanks between words are one."""
    ignore_punctuation: bool = False

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        expected = _expected_texts(prompt)
        given = final_text(text)
        folded = self._folded(given)
        # Nothing is left of "?" without punctuation, and nothing is no answer.
        right = given in expected or (bool(folded) and folded in map(self._folded, expected))
        return Score(
            reward=float(right),
            success=right,
            parts={"accuracy": float(right)},
            attempted=bool(given),
        )

    def _folded(self, text: str) -> str | None:
        if len(text) > MAX_TEXT:
            return None
        if self.ignore_punctuation:
            text = re.sub(r"[^\w\s]|_", "", text)
        if self.ignore_case:
            text = text.casefold()
        return " ".join(text.split()) if self.ignore_blanks else text.strip()


def word_overlap(given: Iterable[str], expected: Iterable[str]) -> float:
    """Return the F1 of the words: 2 shared / (given + expected), in any order.

    >>> word_overlap(["the", "red", "fox"], ["red", "fox"])
    0.8
    """
    one, other = Counter(given), Counter(expected)
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0


def letter_similarity(given: str, expected: str) -> float:
    """Return 2 L / (length + length), L the longest common subsequence of letters.

    That is 1 less the share of letters to strike out or to put in. L is found a row at a time, the
    row held in the bits of one integer (Hyyrö 2004).

    >>> letter_similarity("kitten", "sitting")
    0.6153846153846154
    """
    if not given and not expected:
        return 1.0
    places: dict[str, int] = {}
    for at, letter in enumerate(given):
        places[letter] = places.get(letter, 0) | 1 << at
    full = row = (1 << len(given)) - 1
    for letter in expected:
        matches = row & places.get(letter, 0)
        row = ((row + matches) | (row - matches)) & full
    return 2 * (len(given) - row.bit_count()) / (len(given) + len(expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzyText:
    """How near the text comes to the expected one, the nearest of `prompt.info["answers"]`.

    The mean of `word_overlap` and `letter_similarity`, case and blanks aside. Only the first 2,000
    characters are compared; where one text is longer, the ratio of lengths multiplies the result,
    so that padding never helps. The answer is found as in `ExactText`.
    """

    threshold: float = 0.9
    """From where on the answer counts as right."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                f"reward: threshold = {self.threshold} must lie above 0 and at most at 1"
            )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        given = final_text(text)
        reward, words, letters = max(self._compare(given, e) for e in _expected_texts(prompt))
        return Score(
            reward=reward,
            success=reward >= self.threshold,
            parts={"similarity": reward, "words": words, "letters": letters},
            attempted=bool(given),
        )

    def _compare(self, given: str, expected: str) -> tuple[float, float, float]:
        lengths = sorted((len(given), len(expected)))
        scale = lengths[0] / lengths[1] if lengths[1] > MAX_COMPARED else 1.0
        a, b = (" ".join(t[:MAX_COMPARED].casefold().split()) for t in (given, expected))
        words = scale * word_overlap(re.findall(r"\w+", a), re.findall(r"\w+", b))
        letters = scale * letter_similarity(a, b)
        return (words + letters) / 2, words, letters
