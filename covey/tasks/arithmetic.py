"""The `arithmetic` task: chains of additions and subtractions, such as `47+8-6?`.

A problem starts with a two-digit number and adds or subtracts single digits (3 to 9). Every
intermediate result is between 0 and 99. One sum in six, such as `47+8`, is held out for evaluation.
No training problem contains a held-out sum, and held-out problems contain only held-out sums.
Held-out accuracy measures arithmetic on number pairs that no training problem contains. Covey's
embedded model, a small model inside the package, was trained for this task.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import GeneratedTask, chat_messages
from covey.types import Prompt

HELD_OUT_ONE_IN = 6
DIGITS = range(3, 10)
"""The digits that are added or subtracted. Smaller digits are excluded because they rarely cause a
carry, which is the hard part of a sum."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum of a problem: the number `left`, an operator and the number `right`."""

    left: int
    operator: str
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def carries(self) -> bool:
        units, other = self.left % 10, self.right % 10
        return units + other > 9 if self.operator == "+" else units < other

    @property
    def held_out(self) -> bool:
        """Whether the sum is held out; a hash of the sum decides, so the seed has no effect."""
        return zlib.crc32(f"{self.left}{self.operator}{self.right}".encode()) % HELD_OUT_ONE_IN == 0


@cache
def _choices(held_out: bool) -> dict[int, tuple[Sum, ...]]:
    """Map each left operand to its held-out or training sums; only sums from 0 to 99 are
    included."""
    table = {}
    for left in range(100):
        sums = (Sum(left, operator, right) for operator in "+-" for right in DIGITS)
        table[left] = tuple(s for s in sums if 0 <= s.result < 100 and s.held_out == held_out)
    return table


def chain(random: Random, operations: int, held_out: bool) -> list[Sum]:
    """Draw a problem: a chain of sums, in which each sum starts from the previous result."""
    choices = _choices(held_out)
    while True:
        sums: list[Sum] = []
        left = random.randrange(100)
        while choices[left] and len(sums) < operations:
            sums.append(random.choice(choices[left]))
            left = sums[-1].result
        if len(sums) == operations:
            return sums


def prompt_text(sums: Sequence[Sum]) -> str:
    tail = "".join(f"{s.operator}{s.right}" for s in sums)
    return f"{sums[0].left:02d}{tail}?"


def format_sum(sum: Sum, result: int) -> str:
    """Return a sum and the given result as text; the result may be wrong.

    >>> format_sum(Sum(47, "+", 8), 55)
    '47+8=55'
    """
    return f"{sum.left:02d}{sum.operator}{sum.right}={result:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(GeneratedTask):
    """Chains of additions and subtractions. Problems with more operations are harder."""

    min_operations: int = 2
    max_operations: int = 4
    name: str = "arithmetic"

    def __post_init__(self) -> None:
        GeneratedTask.__post_init__(self)
        if not 1 <= self.min_operations <= self.max_operations <= 12:
            raise ConfigError(
                f"task: min_operations = {self.min_operations} and max_operations = "
                f"{self.max_operations} must satisfy 1 <= min_operations <= max_operations <= 12"
            )

    def _prompt(self, split: str, index: int) -> Prompt:
        low, high = self.min_operations, self.max_operations
        identity = f"arithmetic/{split}/{low}-{high}/{index}"
        random = Random(identity)
        sums = chain(random, random.randint(low, high), held_out=split == "held_out")
        return Prompt(
            id=identity,
            task="arithmetic",
            messages=chat_messages(prompt_text(sums)),
            target=f"{sums[-1].result:02d}",
            info={
                "operations": len(sums),
                "carries": sum(s.carries for s in sums),
                "worked": ";".join(format_sum(s, s.result) for s in sums),
            },
        )
