"""The countdown reward of nanoAhaMoment, with the same point values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.rewards.countdown import ARITHMETIC, published_form, published_solves
from covey.rewards.score import Reward, Score
from covey.rewards.text import tag_contents
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoAha(Reward):
    """The countdown reward of nanoAhaMoment, from 0 to 2, which is `format + equation`.

    | part | value |
    |---|---|
    | format | 1: the text is `<think>..</think>`, newline, `<answer>..</answer>`; 0.5: the same, |
    | | but the answer has other characters than digits, `+-*/().` and spaces; else 0 |
    | equation | 1: the first answer part uses each number exactly once and equals the target |

    The published code evaluates expressions with `eval`, which never finishes on `95**87**64`. A
    later version of the published code uses `literal_eval`, which rejects every sum. Covey does not
    allow powers or `//`.

    Hacks that work on this reward are `repeated padding`, `3,000 words of filler`,
    `gibberish thinking`, `50 useless calls`, `answer before unclosed think` and
    `correct then wrong`.
    """

    prefilled: bool = True
    """Whether the prompt ends with `<think>`, so that the completion starts inside the thinking."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 2.0)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        solved = published_solves(prompt, tag_contents(text, "answer"))
        answer = published_form("<think>" + text if self.prefilled else text)
        form = 0.0
        if answer is not None:
            form = 1.0 if ARITHMETIC.fullmatch(answer) else 0.5
        return Score(
            reward=form + solved,
            success=solved,
            parts={"format": form, "equation": float(solved)},
        )
