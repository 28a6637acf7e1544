"""Countdown: an expression that uses each number once and equals the target."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from covey.rewards.extract import extract_answer
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate, numbers_in
from covey.rewards.math.number import parse_number
from covey.rewards.score import Reward, Score
from covey.rewards.text import split_tags
from covey.types import Prompt

ARITHMETIC = re.compile(r"[0-9+\-*/().\s]+")
TOLERANCE = Fraction(1, 100_000)
"""Maximum difference between the value of an expression and the target in published rewards, as in
the published code."""


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


def published_solves(prompt: Prompt, answers: list[str]) -> bool:
    """Whether the first answer uses each given number exactly once and equals the target."""
    numbers = prompt.info.get("numbers", prompt.info.get("nums"))
    target = prompt.info.get("target")
    if numbers is None or target is None:
        missing = "target" if numbers is not None else "numbers"
        raise ValueError(f"prompt {prompt.id}: countdown needs {missing!r} in info")
    given, value = sorted(int(number) for number in numbers), Fraction(str(target))
    equation = answers[0].strip() if answers else ""
    if not ARITHMETIC.fullmatch(equation):
        return False
    try:
        return sorted(numbers_in(equation)) == given and abs(evaluate(equation) - value) < TOLERANCE
    except ExpressionError:
        return False


def published_form(text: str) -> str | None:
    """Return the answer if the text is one `<think>` part, a newline and one `<answer>` part."""
    found = split_tags(text, ("think", "answer"))
    if found is None or found[0] not in (["", "\n", ""], ["", "\n", "\n"]):
        return None
    return found[1][1].strip()
