"""The countdown reward, for an expression that uses each number once and equals the target."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from covey.rewards.extract import extract_answer
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate, numbers_in
from covey.rewards.math.number import parse_number
from covey.rewards.score import Reward, Score
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown(Reward):
    """1 for an expression that uses each number once and equals the target, and 0 otherwise.

    The expression is the content of the `<answer>` tags after the thinking. An expression consists
    of whole numbers, `+ - * /` and parentheses, and may end with `= target`. The value of the
    expression is computed exactly, so 1/3 * 3 is 1.

    The numbers to use come from `prompt.info["numbers"]`. The target comes from
    `prompt.info["target"]` or, if this entry is missing, from `prompt.target`.
    """

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        target = parse_number(str(prompt.info.get("target", prompt.target)))
        numbers = prompt.info.get("numbers")
        if target is None or not numbers:
            raise ValueError(f"prompt {prompt.id!r} lacks info['numbers'] or info['target']")
        wanted = Counter(map(int, numbers))
        equation = extract_answer(text, ("answer",)) or ""
        expression, equals, result = equation.partition("=")
        uses = success = False
        with suppress(ExpressionError):
            uses = Counter(numbers_in(expression)) == wanted
            stated = not equals or parse_number(result) == target
            success = uses and stated and evaluate(expression) == target
        return Score(
            reward=float(success),
            success=success,
            parts={"accuracy": float(success), "uses_numbers": float(uses)},
            attempted=bool(equation),
        )
