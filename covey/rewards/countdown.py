"""The reward of the numbers game: make the target out of the numbers, each used once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.rewards.expression import ExpressionError, evaluate, numbers_in
from covey.rewards.reading import find_answer, read_number
from covey.rewards.score import Score
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown:
    """1 for an expression that uses each number once and is worth the target; otherwise 0.

    It stands in `<answer>` after the thinking and consists of whole numbers, + - * / and
    parentheses; `= target` may follow. Its value is exact: 1/3 * 3 is 1. The prompt gives `numbers`
    and `target` in its info; without a target its answer is the target.
    """

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        target = read_number(str(prompt.info.get("target", prompt.target)))
        numbers = prompt.info.get("numbers")
        if target is None or not numbers:
            raise ValueError(f"prompt {prompt.id!r} lacks info['numbers'] or info['target']")
        expression = find_answer(text, ("answer",)) or ""
        uses = _uses(expression, Counter(map(int, numbers)))
        right = uses and _is_worth(expression, target)
        return Score(
            reward=float(right),
            success=right,
            parts={"accuracy": float(right), "uses_numbers": float(uses)},
            attempted=bool(expression),
        )


def _uses(equation: str, numbers: Counter[int]) -> bool:
    try:
        return Counter(numbers_in(equation.partition("=")[0])) == numbers
    except ExpressionError:
        return False


def _is_worth(equation: str, target: Fraction) -> bool:
    expression, equals, tail = equation.partition("=")
    if equals and read_number(tail) != target:
        return False
    try:
        return evaluate(expression) == target
    except ExpressionError:
        return False
