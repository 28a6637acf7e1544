"""Sums in a row, such as `47+8-6?`: the embedded task.

A two-digit number, then one digit (3 to 9) after the other to add or take away; every partial
result lies between 0 and 99. One sum in six is held out: no training problem contains it at any
step, and held-out problems consist of nothing else. So held-out accuracy measures arithmetic on
number pairs that were never part of a training problem.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import Generated, check_sizes
from covey.types import Prompt

HELD_OUT_ONE_IN = 6
DIGITS = range(3, 10)
"""What is added or taken away. Small digits seldom carry, and carrying is the point."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One step of a problem: `left`, an operator and `right`."""

    left: int
    operator: str
    right: int

    @property
    def result(self) -> int:
        """The right result."""
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def carries(self) -> bool:
        """Whether the units spill over into the tens."""
        units, other = self.left % 10, self.right % 10
        return units + other > 9 if self.operator == "+" else units < other

    @property
    def held_out(self) -> bool:
        """Whether the sum belongs to the held-out problems. Fixed for ever: it is not seeded."""
        return zlib.crc32(f"{self.left}{self.operator}{self.right}".encode()) % HELD_OUT_ONE_IN == 0


@cache
def _choices(held_out: bool) -> dict[int, tuple[Sum, ...]]:
    """All sums whose result lies between 0 and 99, by their left number."""
    table = {}
    for left in range(100):
        sums = (Sum(left, operator, right) for operator in "+-" for right in DIGITS)
        table[left] = tuple(s for s in sums if 0 <= s.result < 100 and s.held_out == held_out)
    return table


def chain(random: Random, operations: int, held_out: bool) -> list[Sum]:
    """Draw a problem of so many sums, each starting from the result of the one before."""
    choices = _choices(held_out)
    while True:
        sums: list[Sum] = []
        left = random.randrange(100)
        while choices[left] and len(sums) < operations:
            sums.append(random.choice(choices[left]))
            left = sums[-1].result
        if len(sums) == operations:
            return sums


def question(sums: Sequence[Sum]) -> str:
    """Write a problem the way it is asked."""
    tail = "".join(f"{s.operator}{s.right}" for s in sums)
    return f"{sums[0].left:02d}{tail}?"


def written(sum: Sum, result: int) -> str:
    """Write one sum with the result that somebody found.

    >>> written(Sum(47, "+", 8), 55)
    '47+8=55'
    """
    return f"{sum.left:02d}{sum.operator}{sum.right}={result:02d}"


def parse_question(text: str) -> list[Sum]:
    """Read a problem back into its sums.

    >>> [s.result for s in parse_question("47+8-6?")]
    [55, 49]
    """
    sums: list[Sum] = []
    left = int(text[:2])
    for at in range(2, len(text) - 1, 2):
        sums.append(Sum(left, text[at], int(text[at + 1])))
        left = sums[-1].result
    return sums


def problem(split: str, operations: tuple[int, int], index: int) -> Prompt:
    """Return problem `index` of a split: it depends on these three and on nothing else."""
    low, high = operations
    name = f"arithmetic/{split}/{low}-{high}/{index}"
    random = Random(name)
    sums = chain(random, random.randint(low, high), held_out=split == "held_out")
    return Prompt(
        id=name,
        task="arithmetic",
        messages=({"role": "user", "content": question(sums)},),
        target=f"{sums[-1].result:02d}",
        info={
            "operations": len(sums),
            "carries": sum(s.carries for s in sums),
            "worked": ";".join(written(s, s.result) for s in sums),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Sums in a row.

    Difficulty is the number of operations: more steps, more places to go wrong.
    """

    min_operations: int = 2
    max_operations: int = 4
    train_size: int = 100_000
    held_out_size: int = 256
    name: str = "arithmetic"

    def __post_init__(self) -> None:
        check_sizes(self.train_size, self.held_out_size)
        if not 1 <= self.min_operations <= self.max_operations <= 12:
            raise ConfigError(
                "task: operations must satisfy 1 <= min_operations <= max_operations <= 12, "
                f"not {self.min_operations} and {self.max_operations}"
            )

    def train(self) -> Sequence[Prompt]:
        """The training problems."""
        return self._split("train", self.train_size)

    def held_out(self) -> Sequence[Prompt]:
        """The held-out problems."""
        return self._split("held_out", self.held_out_size)

    def _split(self, split: str, size: int) -> Sequence[Prompt]:
        operations = (self.min_operations, self.max_operations)
        return Generated(size, partial(problem, split, operations))
