"""Rewards of published implementations, with their published values.

What was a mistake there is put right here and named in each docstring: expressions are computed
with limits instead of `eval`, signs are read, numbers compare exactly, and no answer raises.

What games them was left as it is, for these are what others trained with; each docstring names the
hacks of `covey rewards lab` that work. For a run of your own take `think_answer` or a template.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.expression import ExpressionError, evaluate, numbers_in
from covey.rewards.reading import last_number, read_number
from covey.rewards.score import Score
from covey.rewards.text import inside, parted
from covey.types import Prompt

_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_ARITHMETIC = re.compile(r"[0-9+\-*/().\s]+")
_ANSWER_AFTER_THINKING = re.compile(r"</think>\s*<answer>")
TOLERANCE = Fraction(1, 100_000)
"""How far from the target a countdown equation may end, as published."""


def gamed_by(reward: object) -> tuple[str, ...]:
    """Return the lab's hacks that work on a published reward, as its docstring names them.

    >>> gamed_by(NanoAha)[-1], gamed_by(str)
    ('right then wrong', ())
    """
    _, _, said = (inspect.getdoc(reward) or "").partition("Gamed by: ")
    named = " ".join(said.partition("\n\n")[0].split()).removesuffix(".")
    return tuple(named.split("; ")) if named else ()


def _last_answer(text: str) -> str | None:
    """What stands in the last answer part. A later tag that is left open hides the ones before."""
    _, opening, rest = text.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer.strip() if opening and closing else None


def _single_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text.replace("\u2212", "-")))
    return read_number(numbers[0]) if len(numbers) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LmBook:
    """GSM8K in `<reasoning>` and `<answer>` tags: 0 to 2.8. From theLMbook and what grew out of it.

    | part | value |
    |---|---|
    | correct | 2.0: the last answer part is the expected text; 1.5: the one number in it is equal |
    | format | 0.2 for each of the four tags that occurs |

    `...` is the placeholder of the prompt and no answer. Here the single number is read exactly,
    not as a float, and `1,000` is one number and not two.

    Gamed by: empty think; blank think; repeated padding; 3,000 words of filler; gibberish
    thinking; 50 useless calls; answer before unclosed think; whole form many times; wrong then
    right.
    """

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 2.8)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        correct = self._correct(prompt.target.strip(), _last_answer(text))
        tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
        present = sum(tag in text for tag in tags)
        return Score(
            reward=(10 * correct + 2 * present) / 10,
            success=correct > 0,
            parts={"correct": correct, "format": present / 5},
        )

    def _correct(self, expected: str, answer: str | None) -> float:
        if not answer or answer == "...":
            return 0.0
        if answer == expected:
            return 2.0
        number = _single_number(answer)
        return 1.5 if number is not None and number == _single_number(expected) else 0.0


def _countdown_problem(prompt: Prompt) -> tuple[list[int], Fraction]:
    numbers = prompt.info.get("numbers", prompt.info.get("nums"))
    target = prompt.info.get("target")
    if numbers is None or target is None:
        missing = "target" if numbers is not None else "numbers"
        raise ValueError(f"prompt {prompt.id}: info has no {missing!r}, which countdown needs")
    return sorted(int(number) for number in numbers), Fraction(str(target))


def _solves(equation: str, numbers: list[int], target: Fraction) -> bool:
    """Whether each number is used exactly once and the value is the target."""
    if not _ARITHMETIC.fullmatch(equation):
        return False
    try:
        return (
            sorted(numbers_in(equation)) == numbers and abs(evaluate(equation) - target) < TOLERANCE
        )
    except ExpressionError:
        return False


def _countdown_form(text: str) -> str | None:
    """The answer, where the text is `<think>..</think>`, a newline and `<answer>..</answer>`."""
    found = parted(text, ("think", "answer"))
    if found is None or found[0] not in (["", "\n", ""], ["", "\n", "\n"]):
        return None
    return found[1][1].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoAha:
    """Countdown of nanoAhaMoment: format + equation, 0 to 2.

    | part | value |
    |---|---|
    | format | 1: `<think>..</think>`, newline, `<answer>..</answer>`, end to end; 0.5: so, but |
    | | the answer is not made of digits, `+-*/().` and blanks alone; else 0 |
    | equation | 1: the first answer part uses each number exactly once and makes the target |

    Published with `eval`, which `95**87**64` keeps busy for ever, and then with `literal_eval`,
    which refuses every sum. Powers and `//` are no part of the game here.

    Gamed by: repeated padding; 3,000 words of filler; gibberish thinking; 50 useless calls;
    answer before unclosed think; right then wrong.
    """

    prefilled: bool = True
    """The prompt ends with `<think>`, so the text begins inside of it."""

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 2.0)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        numbers, target = _countdown_problem(prompt)
        answer = _countdown_form("<think>" + text if self.prefilled else text)
        form = 0.0
        if answer is not None:
            form = 1.0 if _ARITHMETIC.fullmatch(answer) else 0.5
        answers = inside(text, "answer")
        solved = bool(answers) and _solves(answers[0].strip(), numbers, target)
        return Score(
            reward=form + solved,
            success=solved,
            parts={"format": form, "equation": float(solved)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoZero:
    """Countdown of GRPO-Zero: 0.1 format + answer, 0 to 1.1.

    | part | value |
    |---|---|
    | format | 1: `<think>..</think>`, newline, `<answer>..</answer>`, end to end; else 0.1 for a |
    | | think part and 0.5 for an answer part |
    | answer | 1: the first answer part uses each number exactly once and makes the target |

    Its text speaks of a flat 0.1 for the format; the code, and this, give shares of it. Published
    with `eval`; and there the full form may hold further tags inside.

    Gamed by: repeated padding; 3,000 words of filler; gibberish thinking; 50 useless calls;
    answer before unclosed think; right then wrong.
    """

    prefilled: bool = True
    """The prompt ends with `<think>`, so the text begins inside of it."""

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.1)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        numbers, target = _countdown_problem(prompt)
        whole = "<think>" + text if self.prefilled else text
        answers = inside(text, "answer")
        form = 1.0
        if _countdown_form(whole) is None:
            form = (bool(inside(whole, "think")) + 5 * bool(answers)) / 10
        solved = bool(answers) and _solves(answers[0].strip(), numbers, target)
        return Score(
            reward=(form + 10 * solved) / 10,
            success=solved,
            parts={"format": form, "answer": float(solved)},
        )


def _ends_in(text: str, expected: str) -> bool:
    """Whether the last number of a text is the expected one."""
    found, gold = last_number(text), read_number(expected)
    return found is not None and gold is not None and read_number(found) == gold


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleGrpo:
    """GSM8K of Simple GRPO: -2 to 2.25.

    | part | value |
    |---|---|
    | correct | 1: the last number of the text is the expected one; else -1 |
    | format | 1.25: the whole text is `<think>..</think>`, blanks or newlines, and |
    | | `<answer>..</answer>`, each tag exactly once; else -1 |

    The published pattern drops the minus, so that -5 counted as 5, and cuts `1,000` to 0.

    Gamed by: empty think; blank think; repeated padding; 3,000 words of filler; gibberish
    thinking; 50 useless calls; answer before unclosed think; numbers, gold last; gold in a
    comment; answer in thinking only.
    """

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (-2.0, 2.25)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        found = parted(text, ("think", "answer"))
        well_formed = found is not None and (
            not found[0][0] and not found[0][1].strip(" \n") and found[0][2] in ("", "\n")
        )
        # The closing tag is cut off: it is no part of the last word.
        right = _ends_in(text.rstrip().removesuffix("</answer>"), prompt.target)
        correct, form = (1.0 if right else -1.0), (1.25 if well_formed else -1.0)
        return Score(
            reward=correct + form, success=right, parts={"correct": correct, "format": form}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInstruct:
    """The form gate of open-instruct: 0 or `verification_reward`.

    The form holds where an answer part directly follows the end of the thinking, blanks aside:
    `...</think> <answer>...</answer>`. The answer is right where its last number is the expected
    one.

    | additive | value |
    |---|---|
    | false | `verification_reward` for a right answer in the form; the form alone gives nothing |
    | true | `verification_reward` for a right answer + `r1_style_format_reward` for the form |

    Without the form the answer is looked for in the whole text. The published code asks whether the
    format reward equals 1, so any other value of it zeroed every score; this asks whether the form
    holds. Its number pattern drops the minus of whole numbers; this one does not.

    Gamed by: empty think; blank think; repeated padding; 3,000 words of filler; gibberish
    thinking; 50 useless calls; answer before unclosed think; whole form many times; right then
    wrong; numbers, gold last; gold in a comment.
    """

    verification_reward: float = 10.0
    r1_style_format_reward: float = 1.0
    additive: bool = False

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.verification_reward < float("inf"):
            raise ConfigError(
                "reward: verification_reward must be above 0 and finite, "
                f"not {self.verification_reward}"
            )
        if not 0 <= self.r1_style_format_reward < float("inf"):
            raise ConfigError(
                "reward: r1_style_format_reward must be 0 or more and finite, "
                f"not {self.r1_style_format_reward}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """From nothing to a right answer, and the form where it adds."""
        return 0.0, self.verification_reward + self.additive * self.r1_style_format_reward

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        answer = self._answer(text)
        well_formed = answer is not None
        right = _ends_in(text if answer is None else answer, prompt.target)
        counted = right and (well_formed or self.additive)
        reward = self.verification_reward * counted
        if self.additive:
            reward += self.r1_style_format_reward * well_formed
        return Score(
            reward=reward,
            success=counted,
            parts={"verified": float(right), "format": float(well_formed)},
        )

    def _answer(self, text: str) -> str | None:
        last_closing = text.rfind("</answer>")
        starts = [m.end() for m in _ANSWER_AFTER_THINKING.finditer(text, 0, max(0, last_closing))]
        return text[starts[-1] : text.find("</answer>", starts[-1])] if starts else None
