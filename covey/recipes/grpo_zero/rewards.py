"""The countdown reward of GRPO-Zero, with the same point values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.rewards.countdown import published_form, published_solves
from covey.rewards.score import Reward, Score
from covey.rewards.text import tag_contents
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoZero(Reward):
    """The countdown reward of GRPO-Zero: `0.1 * format + answer`, a number from 0 to 1.1.

    | part | value |
    |---|---|
    | format | 1: the text is `<think>..</think>`, newline, `<answer>..</answer>`; else 0.1 for a |
    | | think part and 0.5 for an answer part |
    | answer | 1: the first answer part uses each number exactly once and equals the target |

    GRPO-Zero's README describes a fixed reward of 0.1 for the format. GRPO-Zero's code, like Covey,
    gives partial credit for an incomplete format. Unlike Covey, GRPO-Zero's code uses `eval`, and
    allows further tags inside the think part and the answer part.

    Hacks that work on this reward are `repeated padding`, `3,000 words of filler`,
    `gibberish thinking`, `50 useless calls`, `answer before unclosed think` and
    `correct then wrong`.
    """

    prefilled: bool = True
    """Whether the prompt ends with `<think>`, so that the completion starts inside the thinking."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.1)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        whole = "<think>" + text if self.prefilled else text
        answers = tag_contents(text, "answer")
        solved = published_solves(prompt, answers)
        form = 1.0
        if published_form(whole) is None:
            form = (bool(tag_contents(whole, "think")) + 5 * bool(answers)) / 10
        return Score(
            reward=(form + 10 * solved) / 10,
            success=solved,
            parts={"format": form, "answer": float(solved)},
        )
