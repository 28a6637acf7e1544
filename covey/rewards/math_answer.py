"""The math reward: 1 if the final answer equals the target as a number or as a formula."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.rewards.extract import STYLES, check_styles, extract_answer
from covey.rewards.math.arithmetic_expression import latex_value
from covey.rewards.math.equation import (
    is_name,
    sides,
    solved_interval,
    stated_by_target,
    stated_values,
    strip_unit,
    variables,
)
from covey.rewards.math.notation import exact_decimals, same_numeral, unicode_to_latex
from covey.rewards.math.number import normalise, parse_number, strip_markup
from covey.rewards.math.numeric_equality import same_numerically
from covey.rewards.math.symbolic_equality import (
    MAX_FORMULA,
    is_tractable,
    require_math_verify,
    same_symbolically,
)
from covey.rewards.math.units import asked_nouns
from covey.rewards.score import Score, TargetReward, check_option
from covey.sandbox.scorer import LONGEST
from covey.types import Prompt

MAX_SUMS = 6
"""Maximum number of bracketed sums in a formula. A product of n sums of two terms has up to 2^n
terms."""
MAX_PARTS = 12
"""Maximum number of items of a list for math-verify, which compares the items in every order."""

_ELLIPSIS = re.compile(r"\\[lcdv]?dots(?:[bcmio])?(?![A-Za-z])|\.{3,}")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NO_WORDS = re.compile(r"\\(?:begin|end|operatorname) *\{[A-Za-z*]*\}")
_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z ]*")
_SUM = re.compile(r"[({][^(){}]*[0-9A-Za-z)}] *[-+][^(){}]*[)}]")
_SET_AND_OTHER = ({r"\{", "("}, {r"\{", "["})
_TWO_NUMBERS = re.compile(r"(?:^|[^\w^])[0-9.]+ +[0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathAnswer(TargetReward):
    """1 if the final answer equals the target, as a number or as a formula, otherwise 0.

    Numbers are compared as exact fractions, not as floats. `tolerance` is relative, and applies
    only if the target is not a whole number. If a tolerance of 1 % applied to the target 1000,
    every guess from 990 to 1010 would be correct, and the policy would learn to guess roughly.

    With `symbolic`, formulas are evaluated numerically at a few points. If numeric evaluation does
    not decide whether two formulas are equal, the library math-verify compares the formulas. Covey
    passes only the final answer to math-verify. From a whole completion, math-verify would pick the
    part that matches the target. A formula counts only if it is marked as the final answer, for
    example with `\\boxed`. In a completion without a marked answer, Covey finds only numbers.

    Percentages are not converted: for example, `50%` is 50, not 0.5.
    """

    styles: tuple[str, ...] = STYLES
    tolerance: float = 1e-6
    symbolic: bool = True
    unsafe: bool = False
    """Whether math-verify runs without the sandbox, although it evaluates text as code."""

    version: ClassVar[int] = 3

    def __post_init__(self) -> None:
        TargetReward.__post_init__(self)
        check_styles(self.styles)
        check_option(
            0 <= self.tolerance < 1, f"tolerance = {self.tolerance} must be at least 0 and below 1"
        )
        if self.symbolic:
            require_math_verify(self.unsafe)

    @property
    def max_seconds(self) -> float:
        """The time limit of math-verify for one pair of formulas, in seconds."""
        return LONGEST if self.symbolic else 0.0

    @property
    def quick(self) -> bool:
        """Whether scoring is fast for every text. Comparing formulas (`symbolic`) can be slow."""
        return not self.symbolic

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        target = extract_answer(prompt.target, ("boxed", "hashes")) or prompt.target.strip()
        if not target:
            return self.neutral(f"prompt {prompt.id!r} has no target", ("accuracy", "found"))
        answer = extract_answer(text, self.styles)
        nouns = asked_nouns(prompt.text, target)
        success = answer is not None and self._equal(answer, target, nouns)
        return Score(
            reward=float(success),
            success=success,
            parts={"accuracy": float(success), "found": float(answer is not None)},
            attempted=answer is not None,
        )

    def _equal(self, answer: str, target: str, nouns: frozenset[str] = frozenset()) -> bool:
        same = _same_with_dots(answer, target)
        if same is not None:
            return same
        number, target_number = parse_number(answer, nouns), parse_number(target, nouns)
        tolerance = self.tolerance
        if number is None or target_number is None:
            if max(len(answer), len(target)) > MAX_FORMULA:
                return answer == target
            answer, target = _plain(answer, nouns), _plain(target, nouns)
            if answer.casefold() == target.casefold():
                return True
            if "." not in answer + target:
                tolerance = 0.0  # 1 is not 1 - 2^{-100}: nothing is rounded
            number = latex_value(answer) if number is None else number
            target_number = latex_value(target) if target_number is None else target_number
        if number is not None and target_number is not None:
            if target_number.denominator == 1 or not tolerance:
                return number == target_number  # much faster than a difference of fractions
            allowed = Fraction(tolerance) * abs(target_number)
            return abs(number - target_number) <= allowed
        return self.symbolic and self._same_equation(answer, target, nouns)

    def _same_equation(self, answer: str, target: str, nouns: frozenset[str]) -> bool:
        numerals = same_numeral(answer, target)
        if numerals is not None:
            return numerals
        stated, wanted = sides(answer), sides(target)
        if len(stated) > 1 and (len(wanted) == 1 or len(stated) > 2 or not variables(answer)):
            return self._states(stated, wanted)
        if len(stated) == 1 and len(wanted) > 1 and stated_by_target(target) != target:
            return self._equal(answer, stated_by_target(target), nouns)
        return self._same_formula(answer, target)

    def _states(self, stated: list[str], wanted: list[str]) -> bool:
        """Return whether an equation states at least one value, and only values equal to the
        target."""
        if len(wanted) > 2 or (len(wanted) == 2 and not is_name(wanted[0])):
            return False
        values = stated_values(stated, wanted[-1])
        return bool(values) and all(self._equal(value, wanted[-1]) for value in values)

    def _same_formula(self, answer: str, target: str) -> bool:
        letters = variables(target)
        if any(
            not letters.issuperset(word) for word in _LONG_WORD.findall(_NO_WORDS.sub("", answer))
        ):
            return False  # math-verify ignores some words, and others it reads as factors
        one, other = solved_interval(answer), solved_interval(target)
        if one is not None or other is not None:
            # math-verify does not find x > 2 equal to the target (2, \\infty).
            if one is not None and other is not None and one[0] != other[0]:
                return False
            answer, target = one[1] if one else answer, other[1] if other else target
        # As a product of letters, "seat" would equal "east"; "17 18" would be a sum.
        if any(_WORDS.fullmatch(t) or _TWO_NUMBERS.search(t) for t in (answer, target)):
            return False
        if not is_tractable(answer) or not is_tractable(target):
            return False
        # math-verify would read a set of two numbers as the interval between them.
        if {text[: 1 + (text[:1] == "\\")] for text in (answer, target)} in _SET_AND_OTHER:
            return False
        equal = same_numerically(answer, target)
        if equal is None and all(
            formula.count(",") < MAX_PARTS and len(_SUM.findall(formula)) <= MAX_SUMS
            for formula in (answer, target)
        ):
            return same_symbolically(answer, target, self.unsafe)
        return bool(equal)


def _same_with_dots(answer: str, target: str) -> bool | None:
    """Compare two formulas sign by sign if one has an ellipsis; otherwise return None.

    `{1, 2, ...}` is not `{1, 2}`, although math-verify ignores the dots; `0.333...` is a number.
    """
    if not any("..." in t or "\u2026" in t or "dots" in t for t in (answer, target)):
        return None
    formulas = [exact_decimals(unicode_to_latex(normalise(t))) for t in (answer, target)]
    if not any(map(_ELLIPSIS.search, formulas)):
        return None
    one, other = ["".join(strip_markup(_ELLIPSIS.sub(" @ ", t)).split()) for t in formulas]
    return one == other


def _plain(formula: str, nouns: frozenset[str]) -> str:
    """Return a formula without unit and markup, and with LaTeX in place of Unicode signs."""
    text = exact_decimals(unicode_to_latex(normalise(formula)))
    return strip_markup(strip_unit(text, nouns))
