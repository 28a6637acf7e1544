"""The countdown reward, for an expression that uses each number once and equals the target."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from covey.rewards.extract import extract_answer
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate, numbers_in
from covey.rewards.math.number import parse_number
from covey.rewards.score import Reward, Score
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown(Reward):
    """1 for an expression that uses each number once and equals the target; otherwise 0.

    The expression is in the `<answer>` tags after the thinking. The expression consists of whole
    numbers, + - * / and parentheses, and may end with `= target`. The value of the expression is
    computed exactly, so 1/3 * 3 is 1. `prompt.info` contains `numbers` and, optionally, `target`.
    Without `target` in `prompt.info`, the reward uses `prompt.target`.
    """

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        target = parse_number(str(prompt.info.get("target", prompt.target)))
        numbers = prompt.info.get("numbers")
        if target is None or not numbers:
            raise ValueError(f"prompt {prompt.id!r} lacks info['numbers'] or info['target']")
        equation = extract_answer(text, ("answer",)) or ""
        uses = _uses(equation, Counter(map(int, numbers)))
        success = uses and _equals(equation, target)
        return Score(
            reward=float(success),
            success=success,
            parts={"accuracy": float(success), "uses_numbers": float(uses)},
            attempted=bool(equation),
        )


def _uses(equation: str, numbers: Counter[int]) -> bool:
    try:
        return Counter(numbers_in(equation.partition("=")[0])) == numbers
    except ExpressionError:
        return False


def _equals(equation: str, target: Fraction) -> bool:
    expression, equals, result = equation.partition("=")
    if equals and parse_number(result) != target:
        return False
    try:
        return evaluate(expression) == target
    except ExpressionError:
        return False
