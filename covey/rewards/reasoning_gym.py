"""The reward of a Reasoning Gym problem: what its own data set says of the answer.

Not quite all that it says. Some scorers hand the answer to Python's `eval`, so that what a model
writes would run, or to sympy, which hangs on `9**9**9`; one finds every answer right, one finds
`nan` right, and one finds `0` right wherever `0.375` is. Such answers are wrong here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.rewards.answer import is_tame
from covey.rewards.reading import final_text, read_number
from covey.rewards.score import Score
from covey.types import Prompt

EVALUATING = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose scorer evaluates the answer as Python, or may."""
BY_FIRST_DIGITS = frozenset({"coin_flip"})
"""Data sets of fractions that give full marks for a right beginning: any number that starts so."""
NEAR = 1e-4
NONSENSE = "?"

_PLAIN_DATA = re.compile(r"[\w\s,.\[\]'\"-]{0,10000}", re.ASCII)
_FUNCTIONS = "a?sinh?|a?cosh?|a?tanh?|cot|sec|csc|exp|log|ln|sqrt|Abs"
_CODE = re.compile(
    r"__|\.\s*[A-Za-z_]|\b(?:for|lambda|import|await|yield)\b|[\])'\"}]\s*\(|[\]'\"}]\s*\*"
    rf"|\*\s*[\['\"{{]|[{{}}:;@%\\]|\b(?!(?:{_FUNCTIONS})\s*\()[A-Za-z_]\w*\s*\("
)
_NOT_A_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym:
    """The score of the data set, from 0 to 1; right is full marks.

    Some data sets give part marks, such as 0.01 for any answer at all. The answer is the last
    `<answer>` after the thinking, or all that follows it where there is none.
    """

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    quick: ClassVar[bool] = False
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer. An answer on which the data set's scorer breaks down is wrong."""
        # Here, because it is rarely used and brings much with it.
        from covey.tasks.reasoning_gym import entry_of

        dataset, entry = entry_of(prompt.info)
        answer, expected = final_text(text), str(entry.get("answer"))
        name = prompt.info["reasoning_gym"]["dataset"]
        if answer != expected and not _may_be_scored(answer, expected, name):
            reward = 0.0
        else:
            reward = _score(dataset, answer, entry)
            if reward == 1.0 and answer != expected and _score(dataset, NONSENSE, entry) == 1.0:
                reward = 0.0  # the scorer finds everything right
        return Score(reward=reward, success=reward >= 1 - 1e-6, parts={"accuracy": reward})


def is_harmless(answer: str) -> bool:
    """Whether evaluating the text as Python does nothing but compute something small.

    >>> is_harmless("[[0, 1], [2, 3]]"), is_harmless("x**3/3 + sin(2*x) + C")
    (True, True)
    >>> is_harmless("__import__('os')"), is_harmless("9**9**9")
    (False, False)
    """
    if _PLAIN_DATA.fullmatch(answer) and not _CODE.search(answer):
        return True
    return not _CODE.search(answer) and is_tame(answer)


def _is_near(answer: str, expected: str) -> bool:
    given, gold = read_number(answer), read_number(expected)
    return given is not None and gold is not None and abs(given - gold) <= NEAR


def _may_be_scored(answer: str, expected: str, name: str) -> bool:
    if name in EVALUATING and not is_harmless(answer):
        return False
    if name in BY_FIRST_DIGITS and not _is_near(answer, expected):
        return False
    return not _NOT_A_NUMBER.search(answer) or bool(_NOT_A_NUMBER.search(expected))


def _score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        with warnings.catch_warnings():
            # Some scorers parse the answer as Python, and warn of what they find in it.
            warnings.simplefilter("ignore")
            score = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers take the form of an answer for granted, each in its own way
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0
