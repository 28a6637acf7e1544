"""The reward of theLMbook, with the same point values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.rewards.math.number import parse_number
from covey.rewards.score import Reward, Score
from covey.types import Prompt

_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)


def _single_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text.replace("\u2212", "-")))
    return parse_number(numbers[0]) if len(numbers) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LmBook(Reward):
    """A GSM8K reward from 0 to 2.8 for completions with `<reasoning>` and `<answer>` tags.

    The reward comes from theLMbook and from code that is based on theLMbook.

    | part | value |
    |---|---|
    | correct | 2.0: the last answer part is the target text; 1.5: its only number equals it |
    | format | 0.2 for each of the four tags that occurs |

    The text `...` is a placeholder in the prompt, and is not accepted as an answer. Covey parses
    numbers exactly, not as floats. Covey parses `1,000` as one number, not as two numbers.

    Hacks that work on this reward are `empty think`, `blank think`, `repeated padding`,
    `3,000 words of filler`, `gibberish thinking`, `50 useless calls`,
    `answer before unclosed think`, `whole format many times` and `wrong then correct`.
    """

    bounds: ClassVar[tuple[float, float]] = (0.0, 2.8)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        correct = self._correct(prompt.target.strip(), text)
        tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
        present = sum(tag in text for tag in tags)
        return Score(
            reward=(10 * correct + 2 * present) / 10,
            success=correct > 0,
            parts={"correct": correct, "format": present / 5},
        )

    def _correct(self, target: str, text: str) -> float:
        _, opening, rest = text.rpartition("<answer>")
        answer, closing, _ = rest.partition("</answer>")
        answer = answer.strip() if opening and closing else ""  # the last tag may be open
        if answer in ("", "..."):
            return 0.0
        if answer == target:
            return 2.0
        number = _single_number(answer)
        return 1.5 if number is not None and number == _single_number(target) else 0.0
