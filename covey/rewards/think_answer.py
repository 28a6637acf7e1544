"""The default reward, for a correct answer in the format
`<think>...</think><answer>...</answer>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from covey.rewards.coherence import robust_factor
from covey.rewards.score import Score, TargetReward, check_option
from covey.rewards.text import only_tags
from covey.types import Prompt

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")


def parse_think_answer(text: str) -> str | None:
    """Return the text between the answer tags, or None if the format is wrong.

    The format is correct if the completion is one non-empty `<think>` part followed by one
    non-empty `<answer>` part. The format is wrong if a tag is repeated, nested or not closed, or if
    there is text outside the tags.

    >>> parse_think_answer("<think>1+1=2</think><answer> 2 </answer>")
    '2'
    >>> parse_think_answer("<answer>2</answer>") is None
    True
    """
    parts = only_tags(text, ("think", "answer"))
    return None if parts is None else parts[1].strip()


def same_answer(answer: str, target: str) -> bool:
    """Compare two answers as exact numbers if both are numbers, and otherwise as text.

    >>> same_answer("7.0", "07"), same_answer("9007199254740992", "9007199254740993")
    (True, False)
    """
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(target):
        return Decimal(answer) == Decimal(target)
    return answer == target


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkAnswer(TargetReward):
    """The default reward, for a correct answer in the right format.

    The right format earns `format` points. A correct answer in the right format earns `correct`
    further points. With `robust`, a correct answer earns fewer points if the completion shows signs
    of reward hacking, such as repetition or thinking that is not language (see `robust_factor`).
    """

    correct: float = 0.9
    format: float = 0.1
    robust: bool = True

    def __post_init__(self) -> None:
        TargetReward.__post_init__(self)
        check_option(
            self.correct >= 0 and self.format >= 0 and self.correct + self.format > 0,
            f"weights must be positive, not correct={self.correct}, format={self.format}",
        )

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, self.correct + self.format

    def __call__(self, prompt: Prompt, text: str) -> Score:
        answer = parse_think_answer(text)
        well_formed = answer is not None
        target = prompt.target.strip()
        success = answer is not None and target != "" and same_answer(answer, target)
        missing = f"prompt {prompt.id!r} has no target"
        correct = float(success) if target else self.neutral(missing, ()).reward
        # The factor is slow to compute, so it is computed only for correct completions.
        factor = robust_factor(text) if success and self.robust else 1.0
        return Score(
            reward=self.correct * correct * factor + self.format * well_formed,
            success=success,
            parts={"correct": correct, "format": float(well_formed), "robust": factor},
        )
