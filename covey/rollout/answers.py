"""Statistics of final answers, which reveal a policy that ignores the prompt.

The reward also rises if a policy learns to answer every prompt with the most frequent target. Only
the variety of the answers shows whether a policy learns the task or ignores the prompt.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_TARGET = 64
"""Maximum target length, in characters, for which statistics of targets are computed."""
TAIL = 400
"""The final answer is searched for in this many characters at the end of a completion."""

_MARKED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)|\\boxed\{([^{}]*)\}|#### *([^\n]*)", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def final_answer(text: str) -> str:
    r"""Return the final answer of a completion, for statistics of answers and not for rewards.

    The final answer is the last answer in `<answer>` or `\boxed{}` or after `####`. Without such an
    answer, it is the last number, or else the last line.

    >>> final_answer("7 or <answer> 8 </answer>"), final_answer("It is 1,008."), final_answer("No.")
    ('8', '1008', 'no.')
    """
    tail = text[-TAIL:]
    marked = list(_MARKED.finditer(tail))
    if marked:
        answer = next((group for group in marked[-1].groups() if group is not None), "")
    else:
        numbers = _NUMBER.findall(tail)
        answer = numbers[-1].replace(",", "") if numbers else tail.rstrip().rpartition("\n")[2]
    return " ".join(answer.lower().split())


def target_counts(targets: Sequence[str]) -> AnswerCounts | None:
    """Count the targets; return None if a target is empty or longer than LONGEST_TARGET."""
    if any(not target.strip() or len(target) > LONGEST_TARGET for target in targets):
        return None
    return AnswerCounts.of([target.strip() for target in targets])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """The distribution of final answers or targets."""

    distinct: int
    effective: float
    """Effective number of answers: exp of the entropy of their frequencies."""
    top: str
    """The most frequent answer."""
    top_share: float

    @staticmethod
    def of(answers: Sequence[str]) -> AnswerCounts:
        """Count answers; `answers` must not be empty."""
        counts = Counter(answers)
        top, most = counts.most_common(1)[0]
        shares = [count / len(answers) for count in counts.values()]
        return AnswerCounts(
            distinct=len(counts),
            effective=math.exp(-math.fsum(share * math.log(share) for share in shares)),
            top=top,
            top_share=most / len(answers),
        )
