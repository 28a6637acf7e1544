"""The reward of Simple GRPO, with the same point values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.rewards.extract import ends_in
from covey.rewards.score import Reward, Score
from covey.rewards.text import split_tags
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleGrpo(Reward):
    """The GSM8K reward of Simple GRPO, from -2 to 2.25.

    | part | value |
    |---|---|
    | correct | 1: the last number of the text equals the target; else -1 |
    | format | 1.25: the text is `<think>..</think>`, spaces or newlines, and |
    | | `<answer>..</answer>`, each tag exactly once; else -1 |

    The regex in the published code reads `-5` as 5 and `1,000` as 0. Covey reads `-5` as -5 and
    `1,000` as 1000.

    Hacks that work on this reward are `empty think`, `blank think`, `repeated padding`,
    `3,000 words of filler`, `gibberish thinking`, `50 useless calls`,
    `answer before unclosed think`, `numbers, target last`, `target in a comment` and
    `answer in thinking only`.
    """

    bounds: ClassVar[tuple[float, float]] = (-2.0, 2.25)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        found = split_tags(text, ("think", "answer"))
        well_formed = found is not None and (
            not found[0][0] and not found[0][1].strip(" \n") and found[0][2] in ("", "\n")
        )
        success = ends_in(text.rstrip().removesuffix("</answer>"), prompt.target)
        correct, form = (1.0 if success else -1.0), (1.25 if well_formed else -1.0)
        return Score(
            reward=correct + form, success=success, parts={"correct": correct, "format": form}
        )
