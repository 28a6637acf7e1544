"""The reward of open-instruct, with the same point values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from covey.rewards.extract import ends_in
from covey.rewards.score import Reward, Score, check_option
from covey.types import Prompt

_ANSWER_AFTER_THINKING = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInstruct(Reward):
    """The reward of open-instruct, which by default is 0 for a wrong format.

    The format is correct if only whitespace separates the end of the thinking from the answer part,
    as in `...</think> <answer>...</answer>`. The answer is correct if its last number equals the
    target.

    | additive | value |
    |---|---|
    | false | `verification_reward` for a correct answer in the format; nothing for the format |
    | true | `verification_reward` for a correct answer + `r1_style_format_reward` for the format |

    If the format is wrong, the last number of the whole text is the answer. The published code
    recognizes a correct format by a format reward of exactly 1, so every score is 0 if
    `r1_style_format_reward` is not 1. In Covey, any value of `r1_style_format_reward` works. The
    regex in the published code drops the minus sign of whole numbers, but Covey keeps the sign.

    Hacks that work on this reward are `empty think`, `blank think`, `repeated padding`,
    `3,000 words of filler`, `gibberish thinking`, `50 useless calls`,
    `answer before unclosed think`, `whole format many times`, `correct then wrong`,
    `numbers, target last` and `target in a comment`.
    """

    verification_reward: float = 10.0
    r1_style_format_reward: float = 1.0
    additive: bool = False

    def __post_init__(self) -> None:
        check_option(
            0 < self.verification_reward < float("inf"),
            f"verification_reward must be above 0 and finite, not {self.verification_reward}",
        )
        check_option(
            0 <= self.r1_style_format_reward < float("inf"),
            f"r1_style_format_reward must be 0 or more and finite, "
            f"not {self.r1_style_format_reward}",
        )

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, self.verification_reward + self.additive * self.r1_style_format_reward

    def __call__(self, prompt: Prompt, text: str) -> Score:
        end = max(0, text.rfind("</answer>"))
        starts = [match.end() for match in _ANSWER_AFTER_THINKING.finditer(text, 0, end)]
        answer = text[starts[-1] : text.find("</answer>", starts[-1])] if starts else None
        well_formed = answer is not None
        correct = ends_in(text if answer is None else answer, prompt.target)
        success = correct and (well_formed or self.additive)
        reward = self.verification_reward * success
        if self.additive:
            reward += self.r1_style_format_reward * well_formed
        return Score(
            reward=reward,
            success=success,
            parts={"verified": float(correct), "format": float(well_formed)},
        )
