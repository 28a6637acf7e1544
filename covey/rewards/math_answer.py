"""The math reward: 1 if the final answer equals the target as a number or as a formula."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.rewards.extract import STYLES, check_styles, extract_answer
from covey.rewards.math.arithmetic_expression import latex_value
from covey.rewards.math.number import (
    asked_nouns,
    exact_decimals,
    is_unit,
    names_a_value,
    normalise,
    parse_number,
    same_numeral,
    strip_markup,
    unicode_to_latex,
)
from covey.rewards.math.numeric_equality import (
    MAX_FORMULA,
    is_tractable,
    require_math_verify,
    same_numerically,
    same_symbolically,
)
from covey.rewards.score import Score, TargetReward, check_option
from covey.sandbox.scorer import LONGEST
from covey.types import Prompt

# Splits equations in an answer, finds the value that an equation states, and removes units.


_COMMAND = re.compile(r"\\([A-Za-z]+)(?: ?\{[^{}]*\})?")
_TEXT = ("text", "textbf", "textit", "textrm", "mathrm", "mbox", "hbox", "operatorname")
_GREEK = re.compile(
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|"
    "tau|upsilon|phi|chi|psi|omega)",
    re.IGNORECASE,
)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()]*\))?")
_MULTIPLE = re.compile(r"(?:-|-? *[0-9./]+) *[A-Za-z]")
_OTHER_RELATION = re.compile(
    r"[<>≈;]|!=|\\(?:l|g|n)eq?(?![A-Za-z])|\\(?:neq|approx|simeq|sim|to|in|text)(?![A-Za-z])"
)
_EQUALS = re.compile(r":=|==|\\equiv(?![A-Za-z])")


def sides(formula: str) -> list[str]:
    """Split a formula into sides at its equals signs.

    Equals signs inside brackets are ignored. Lists and formulas with a relation other than `=` are
    not split.

    >>> sides("x = 6*7 = 42"), sides("x = 3, y = 4"), sides("= 42")
    (['x', '6*7', '42'], ['x = 3, y = 4'], ['42'])
    """
    if ("=" not in formula and r"\equiv" not in formula) or _OTHER_RELATION.search(formula):
        return [formula]
    text = _EQUALS.sub("=", formula)
    depth, cuts = 0, [-1]
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign == ",":
            return [formula]
        if depth == 0 and sign == "=":
            cuts.append(at)
    found = [text[a + 1 : b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [side for at, side in enumerate(found) if side or at]


def variables(formula: str) -> set[str]:
    r"""Return the variables of a formula, without the constants e, i and pi.

    >>> sorted(variables(r"2\pi r + \sin\theta")), variables(r"e^2 \text{ cm}")
    (['\\theta', 'r'], set())
    """
    greek = {
        f"\\{name}" for name in re.findall(r"\\([A-Za-z]+)", formula) if _GREEK.fullmatch(name)
    }
    bare = _COMMAND.sub(lambda m: " " if m[1] in _TEXT else m[0][len(m[1]) + 1 :], formula)
    return greek | (set(re.findall("[A-Za-z]", bare)) - {"e", "i"})


def stated_values(parts: list[str], target: str) -> list[str]:
    """Return the sides of an equation that must equal the target, or [] for an unsolved equation.

    An equation with words that do not name a value, such as `wrong = 42`, has no such side either.
    A side that is a number, or that has the same variables as the target, must equal the target. A
    side such as `x` in `x = 42` only names the value, and is not returned. An equation such as
    `2x = 42` is unsolved.

    >>> stated_values(["x", "41", "42"], "42"), stated_values(["2x", "42"], "42")
    (['41', '42'], [])
    """
    target_variables = variables(target)
    values: list[str] = []
    rest: list[str] = []
    for part in parts:
        named = is_name(part) and part not in target_variables
        could_be = variables(part) == target_variables or parse_number(part) is not None
        (values if could_be and not named else rest).append(part)
    if any(_MULTIPLE.fullmatch(part) or has_unknown_words(part) for part in rest):
        return []
    return values or parts[-1:]


def is_name(formula: str) -> bool:
    """Whether a formula is a name for a value, such as `x`, `x_1`, `f(x)` or `Area`."""
    return _NAME.fullmatch(formula) is not None and not has_unknown_words(formula)


def has_unknown_words(formula: str) -> bool:
    r"""Whether a formula has a word that is not known to name a value, such as `wrong` or `half`.

    >>> has_unknown_words(r"2\sin x + ab"), has_unknown_words("wrong answer")
    (False, True)
    """
    words = _COMMAND.sub(lambda m: m[0][len(m[1]) + 1 :] if m[1] in _TEXT else " ", formula)
    return not names_a_value(words)


_UNIT_AT_END = re.compile(
    r"(?P<value>.*[0-9A-Za-z)}\]]) *"
    r"(?:\\(?:text|textrm|textit|mathrm|mbox|hbox) ?\{ *(?P<unit>[^{}]{1,40}?)\.? *\}"
    r"(?: ?\^ ?\{?-?[23]\}?)?"
    r"|(?<=[ }])(?P<bare>rad(?:ian)?s?|deg(?:ree)?s?|(?:sq(?:uare)? |cubic )?units?))\.? *\$?",
    re.DOTALL,
)


def strip_unit(formula: str, nouns: frozenset[str] = frozenset()) -> str:
    r"""Return a formula without the unit at its end.

    >>> strip_unit(r"\frac{\pi}{2}\text{ rad}"), strip_unit(r"x \text{ or } y")
    ('\\frac{\\pi}{2}', 'x \\text{ or } y')
    """
    match = _UNIT_AT_END.fullmatch(formula)
    if match is None or not re.search(r"[0-9\\]", match["value"]):
        return formula
    unit = match["bare"] or match["unit"].strip()
    return match["value"] if is_unit(unit, glued=False, nouns=nouns) else formula


_RELATION = re.compile(
    r"(\\(?:leq?(?:slant)?|lt)(?![A-Za-z])|\\(?:geq?(?:slant)?|gt)(?![A-Za-z])|[<>]=?"
    r"|\\neq?(?![A-Za-z])|!=)"
)
_OR = re.compile(r"\\text ?\{ *or *\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_SET_OF = re.compile(
    r"(?:\\left)?\\\{ *(?P<x>[A-Za-z])(?: *\\in *\\(?:mathbb ?\{?R\}?|R))? *"
    r"(?::|\||\\mid(?![A-Za-z])|\\vert(?![A-Za-z])) *(?P<rule>.*?) *(?:\\right)?\\\}"
)
_IN = re.compile(r"(?P<x>[A-Za-z]) *\\in(?![A-Za-z]) *(?P<interval>.*)")
_UNKNOWN = re.compile(r"[A-Za-z]|\\[A-Za-z]+|[A-Za-z]_(?:[0-9]|\{[0-9]+\})")


def solved_interval(formula: str) -> tuple[str, str] | None:
    r"""Return the unknown and the interval of a solved inequality, or None for another formula.

    An inequality is solved if the unknown stands alone and its bounds are constants.

    >>> solved_interval("2 < x"), solved_interval(r"x<1 or x \ge 3")
    (('x', '(2,\\infty)'), ('x', '(-\\infty,1)\\cup[3,\\infty)'))
    >>> solved_interval("2x < 4"), solved_interval("x < a")
    (None, None)
    """
    found = _SET_OF.fullmatch(formula.strip())
    if found is not None:
        inner = solved_interval(found["rule"])
        return inner if inner is not None and inner[0] == found["x"] else None
    member = _IN.fullmatch(formula.strip())
    if member is not None:
        return member["x"], member["interval"]
    parts = [_one_interval(part) for part in _OR.split(formula)]
    solved = [part for part in parts if part is not None]
    if len(solved) != len(parts) or len({unknown for unknown, _ in solved}) != 1:
        return None
    return solved[0][0], r"\cup".join(interval for _, interval in solved)


def _one_interval(formula: str) -> tuple[str, str] | None:
    terms = [term.strip() for term in _RELATION.split(formula)]
    if len(terms) not in (3, 5):
        return None
    # 1 for <, -1 for >; an open end has a strict sign.
    ways = [
        0 if "n" in s or "!" in s else 1 if "<" in s or "l" in s[1:2] else -1 for s in terms[1::2]
    ]
    is_open = [s in ("<", ">", r"\lt", r"\gt") for s in terms[1::2]]
    if len(set(ways)) > 1:
        return None
    if ways[0] < 0:
        terms, is_open, ways = terms[::-1], is_open[::-1], [1] * len(ways)
    unknowns = [at for at in range(0, len(terms), 2) if _UNKNOWN.fullmatch(terms[at])]
    unknowns = [at for at in unknowns if variables(terms[at])]
    bounds = [term for at, term in enumerate(terms) if at % 2 == 0 and at not in unknowns]
    if len(unknowns) != 1 or any(variables(b) or not b or re.search("[=,]", b) for b in bounds):
        return None
    at, unknown = unknowns[0], terms[unknowns[0]]
    if not ways[0]:
        one = bounds[0] if len(bounds) == 1 else ""
        return (unknown, rf"(-\infty,{one})\cup({one},\infty)") if one else None
    if len(terms) == 5 and at != 2:
        return None
    low, low_open = (terms[at - 2], is_open[at // 2 - 1]) if at else (r"-\infty", True)
    last = at == len(terms) - 1
    high, high_open = (r"\infty", True) if last else (terms[at + 2], is_open[at // 2])
    low_open, high_open = low_open or "infty" in low, high_open or "infty" in high
    return unknown, f"{'(' if low_open else '['}{low},{high}{')' if high_open else ']'}"


def stated_by_target(target: str) -> str:
    """Return the value that a target such as `f(3) = 42` or `6*7 = 42` states, or the target.

    >>> stated_by_target("42 = x"), stated_by_target("x^2 + y^2 = 25")
    ('42', 'x^2 + y^2 = 25')
    """
    values = [side for side in sides(target) if not is_name(side)]
    numbers = {latex_value(value) for value in values}
    known = len(values) == 1 or (len(numbers) == 1 and None not in numbers)
    return values[-1] if known else target


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
        return LONGEST if self.symbolic else 0.0

    @property
    def quick(self) -> bool:
        return not self.symbolic

    def __call__(self, prompt: Prompt, text: str) -> Score:
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
    text = exact_decimals(unicode_to_latex(normalise(formula)))
    return strip_markup(strip_unit(text, nouns))
