"""The reward of `<think>...</think><answer>...</answer>`: correct, and in the right form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.robust import robust_factor
from covey.rewards.score import Score
from covey.types import Prompt

_TAG = re.compile(r"</?(?:think|answer)>")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
_FORM = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def read_answer(text: str) -> str | None:
    """Return what stands between the answer tags, or None if the form does not hold.

    The form holds when the whole text is one non-empty `<think>` part followed by one non-empty
    `<answer>` part: tags repeated, nested, left open or followed by more text do not count.

    >>> read_answer("<think>1+1=2</think><answer> 2 </answer>")
    '2'
    >>> read_answer("<answer>2</answer>") is None
    True
    """
    if len(_TAG.findall(text)) != 4:
        return None
    match = _FORM.fullmatch(text)
    if match is None or not match.group(1).strip():
        return None
    return match.group(2).strip() or None


def equal_answers(given: str, expected: str) -> bool:
    """Compare as numbers, exactly, where both are; otherwise as text.

    >>> equal_answers("7.0", "07"), equal_answers("9007199254740992", "9007199254740993")
    (True, False)
    """
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected):
        return Decimal(given) == Decimal(expected)
    return given == expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkAnswer:
    """`correct` for a right answer in the right form, plus `format` for the form alone.

    Gated: an answer that the form hides is not correct. `robust`: a right answer counts less where
    the thinking is padding or no language at all; see `robust_factor`.
    """

    correct: float = 0.9
    format: float = 0.1
    robust: bool = True

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.correct < 0 or self.format < 0 or self.correct + self.format == 0:
            raise ConfigError(
                f"reward: weights must be positive, not correct={self.correct}, "
                f"format={self.format}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """From nothing to both."""
        return 0.0, self.correct + self.format

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        answer = read_answer(text)
        well_formed = answer is not None
        success = answer is not None and equal_answers(answer, prompt.target.strip())
        # Only what earns something is worth a closer look.
        factor = robust_factor(text) if success and self.robust else 1.0
        return Score(
            reward=self.correct * success * factor + self.format * well_formed,
            success=success,
            parts={"correct": float(success), "format": float(well_formed), "robust": factor},
        )
