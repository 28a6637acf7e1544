"""Statistics of final answers, which show a policy that answers the same whatever the prompt.

A policy that always gives the most frequent target has the accuracy of that constant, and its
reward curve rises like that of one that learns. Only the variety of its answers tells them apart.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_TARGET = 64
"""Characters of a target that can be a final answer."""
TAIL = 400
"""Characters at the end of a completion in which a final answer without a mark is looked for."""

_MARKED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)|\\boxed\{([^{}]*)\}|#### *([^\n]*)", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def final_answer(text: str) -> str:
    r"""Return what a completion answers, to count equal answers; no reward is computed from it.

    The last marked answer, else the last number, else the last line.

    >>> final_answer("7 or <answer> 8 </answer>"), final_answer("It is 1,008."), final_answer("No.")
    ('8', '1008', 'no.')
    """
    tail = text[-TAIL:]
    marked = [match for match in _MARKED.finditer(tail)]
    if marked:
        answer = next((group for group in marked[-1].groups() if group is not None), "")
    else:
        numbers = _NUMBER.findall(tail)
        answer = numbers[-1].replace(",", "") if numbers else tail.rstrip().rpartition("\n")[2]
    return " ".join(answer.lower().split())


def target_counts(targets: Sequence[str]) -> AnswerCounts | None:
    """Count targets; None if they are not short answers, but texts or programs."""
    if any(not target.strip() or len(target) > LONGEST_TARGET for target in targets):
        return None
    return AnswerCounts.of([target.strip() for target in targets])


def best_constant(targets: Sequence[str]) -> float | None:
    """Return the accuracy of the best constant answer, by the most frequent target.

    >>> best_constant(["1", "1", "2", "3"]), best_constant(["a long text " * 9])
    (0.5, None)
    """
    counts = target_counts(targets)
    return None if counts is None else counts.top_share


def spaced(items: Sequence[str], most: int) -> list[str]:
    """Return at most `most` items, evenly spaced."""
    step = max(1, math.ceil(len(items) / most))
    return list(items[::step])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """How the final answers of some completions, or targets, are distributed."""

    distinct: int
    effective: float
    """exp of the entropy: the number of equally frequent answers with as much variety."""
    top: str
    """The most frequent."""
    top_share: float

    @staticmethod
    def of(answers: Sequence[str]) -> AnswerCounts:
        """Count answers. There must be some."""
        counts = Counter(answers)
        top, most = counts.most_common(1)[0]
        shares = [count / len(answers) for count in counts.values()]
        return AnswerCounts(
            distinct=len(counts),
            effective=math.exp(-math.fsum(share * math.log(share) for share in shares)),
            top=top,
            top_share=most / len(answers),
        )
