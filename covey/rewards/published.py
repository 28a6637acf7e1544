"""Rewards of published GRPO implementations, with the same point values.

Bugs of the published implementations are fixed, and the docstring of each reward names the fixes.
Covey evaluates expressions with limits and without `eval`, reads the signs of numbers, and compares
numbers exactly. The rewards never raise an error, whatever the completion is.

Covey does not fix known hacks of the published rewards, because published models were trained with
these rewards. The command `covey rewards lab` tries known hacks. The docstring of each reward lists
the hacks that work on the reward. For your own runs, use the reward `think_answer` or a reward
template.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.rewards.extract import last_number
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate, numbers_in
from covey.rewards.math.number import parse_number
from covey.rewards.score import Reward, Score, check_option
from covey.rewards.text import split_tags, tag_contents
from covey.types import Prompt

_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_ARITHMETIC = re.compile(r"[0-9+\-*/().\s]+")
_ANSWER_AFTER_THINKING = re.compile(r"</think>\s*<answer>")
TOLERANCE = Fraction(1, 100_000)
"""Maximum difference between the value of a countdown expression and the target, as in the
published code."""


def gamed_by(reward: object) -> tuple[str, ...]:
    """Return the hacks that work on a published reward, as listed in the reward's docstring.

    >>> gamed_by(NanoAha)[-1], gamed_by(str)
    ('correct then wrong', ())
    """
    _, _, listed = (inspect.getdoc(reward) or "").partition("Hacks that work on this reward are ")
    return tuple(re.findall(r"`(.*?)`", listed.partition("\n\n")[0]))


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
        """Score one completion."""
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


def _solves(prompt: Prompt, answers: list[str]) -> bool:
    """Whether the first answer uses each given number exactly once and equals the target."""
    numbers = prompt.info.get("numbers", prompt.info.get("nums"))
    target = prompt.info.get("target")
    if numbers is None or target is None:
        missing = "target" if numbers is not None else "numbers"
        raise ValueError(f"prompt {prompt.id}: countdown needs {missing!r} in info")
    given, value = sorted(int(number) for number in numbers), Fraction(str(target))
    equation = answers[0].strip() if answers else ""
    if not _ARITHMETIC.fullmatch(equation):
        return False
    try:
        return sorted(numbers_in(equation)) == given and abs(evaluate(equation) - value) < TOLERANCE
    except ExpressionError:
        return False


def _countdown_answer(text: str) -> str | None:
    """Return the answer if the text is one `<think>` part, a newline and one `<answer>` part."""
    found = split_tags(text, ("think", "answer"))
    if found is None or found[0] not in (["", "\n", ""], ["", "\n", "\n"]):
        return None
    return found[1][1].strip()


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
        """Score one completion."""
        solved = _solves(prompt, tag_contents(text, "answer"))
        answer = _countdown_answer("<think>" + text if self.prefilled else text)
        form = 0.0
        if answer is not None:
            form = 1.0 if _ARITHMETIC.fullmatch(answer) else 0.5
        return Score(
            reward=form + solved,
            success=solved,
            parts={"format": form, "equation": float(solved)},
        )


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
        """Score one completion."""
        whole = "<think>" + text if self.prefilled else text
        answers = tag_contents(text, "answer")
        solved = _solves(prompt, answers)
        form = 1.0
        if _countdown_answer(whole) is None:
            form = (bool(tag_contents(whole, "think")) + 5 * bool(answers)) / 10
        return Score(
            reward=(form + 10 * solved) / 10,
            success=solved,
            parts={"format": form, "answer": float(solved)},
        )


def _ends_in(text: str, target: str) -> bool:
    """Whether the last number of a text equals the target."""
    found, number = last_number(text), parse_number(target)
    return found is not None and number is not None and parse_number(found) == number


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
        """Score one completion."""
        found = split_tags(text, ("think", "answer"))
        well_formed = found is not None and (
            not found[0][0] and not found[0][1].strip(" \n") and found[0][2] in ("", "\n")
        )
        success = _ends_in(text.rstrip().removesuffix("</answer>"), prompt.target)
        correct, form = (1.0 if success else -1.0), (1.25 if well_formed else -1.0)
        return Score(
            reward=correct + form, success=success, parts={"correct": correct, "format": form}
        )


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
        """The lowest and the highest reward, including the format reward if `additive` is true."""
        return 0.0, self.verification_reward + self.additive * self.r1_style_format_reward

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        answer = self._answer(text)
        well_formed = answer is not None
        correct = _ends_in(text if answer is None else answer, prompt.target)
        success = correct and (well_formed or self.additive)
        reward = self.verification_reward * success
        if self.additive:
            reward += self.r1_style_format_reward * well_formed
        return Score(
            reward=reward,
            success=success,
            parts={"verified": float(correct), "format": float(well_formed)},
        )

    def _answer(self, text: str) -> str | None:
        last_closing = text.rfind("</answer>")
        starts = [m.end() for m in _ANSWER_AFTER_THINKING.finditer(text, 0, max(0, last_closing))]
        return text[starts[-1] : text.find("</answer>", starts[-1])] if starts else None
