"""Make a number out of others, such as 27 out of 3, 5 and 12: `12 + 5 * 3`.

Every problem has a solution, because it is made from one: numbers are joined two by two with
+ - * / until one is left, every result whole and positive, and that one is the target.

Train and held-out problems never share numbers and target: a hash of both says where a problem
belongs, whatever the order of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import Generated, asked, check_sizes, hash_share
from covey.types import Prompt

HELD_OUT_SHARE = 0.2
REGROUPING = {("-", "+"), ("-", "-"), ("/", "*"), ("/", "/")}
"""An operator, and that of its right side, which without parentheses would be read otherwise."""


@dataclass(frozen=True, slots=True)
class Term:
    """A whole number with an expression for it, and the operator that the expression ends in."""

    value: int
    text: str
    operator: str = ""

    def within(self, operator: str, right: bool) -> str:
        """Write it as one side of `operator`, in parentheses only where they are needed."""
        below_product = self.operator in ("+", "-") and operator in ("*", "/")
        regroups = right and (operator, self.operator) in REGROUPING
        return f"({self.text})" if below_product or regroups else self.text


def join(left: Term, right: Term, operator: str) -> Term | None:
    """Join two terms, or return None where the result is not a whole positive number.

    >>> join(Term(6, "6"), Term(2, "2"), "/"), join(Term(2, "2"), Term(6, "6"), "-")
    (Term(value=3, text='6 / 2', operator='/'), None)
    """
    if operator == "/":
        value, rest = divmod(left.value, right.value)
        if rest:
            return None
    else:
        a, b = left.value, right.value
        value = a + b if operator == "+" else a - b if operator == "-" else a * b
    if value < 1:
        return None
    sides = left.within(operator, right=False), right.within(operator, right=True)
    return Term(value, f"{sides[0]} {operator} {sides[1]}", operator)


def solved(random: Random, numbers: Sequence[int]) -> Term:
    """Join all numbers in random order by random operators that go."""
    terms = [Term(n, str(n)) for n in numbers]
    while len(terms) > 1:
        left = terms.pop(random.randrange(len(terms)))
        right = terms.pop(random.randrange(len(terms)))
        # A sum always goes, so that one of the four is found.
        joined = None
        while joined is None:
            operator = random.choice("+-*/")
            # Or differences and quotients would be rare beside sums.
            swap = operator in "-/" and left.value < right.value
            joined = join(right, left, operator) if swap else join(left, right, operator)
        terms.append(joined)
    return terms[0]


def question(numbers: Sequence[int], target: int) -> str:
    """Write a problem the way it is asked."""
    listed = ", ".join(map(str, numbers[:-1]))
    return (
        f"Write an arithmetic expression whose value is {target}. Use each of the numbers "
        f"{listed} and {numbers[-1]} exactly once, and no others, with +, -, *, / and parentheses. "
        "Show your thinking between <think> and </think>, and give the final expression between "
        "<answer> and </answer>, such as <answer>(1 + 2) / 3</answer>."
    )


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Whether numbers, in any order, and target are among the held-out ones. Fixed for ever."""
    return hash_share(f"{sorted(numbers)} {target}") < HELD_OUT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown:
    """Make `target` out of `numbers` by + - * / and parentheses, using each number once.

    More numbers make it harder. `template`, if given, is how a problem is asked, with {numbers} and
    {target}; `system` comes before it.

    A data set with columns of its own can stand in for the generator:
    the tasks `jsonl` and `hub` read rows of `nums` and `target` with the options
    answer = "target", columns = {nums = "numbers", target = "target"} and
    template = "Make {target} out of {nums} ...".
    """

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 99
    max_target: int = 999
    train_size: int = 100_000
    held_out_size: int = 256
    template: str = ""
    system: str = ""
    name: str = "countdown"

    def __post_init__(self) -> None:
        check_sizes(self.train_size, self.held_out_size)
        if not 3 <= self.min_numbers <= self.max_numbers <= 6:
            raise ConfigError(
                "task: numbers must satisfy 3 <= min_numbers <= max_numbers <= 6, "
                f"not {self.min_numbers} and {self.max_numbers}"
            )
        if self.max_number < 10 or self.max_target < 20:
            raise ConfigError(
                "task: max_number must be at least 10 and max_target at least 20, "
                f"not {self.max_number} and {self.max_target}"
            )
        if self.template and not all(place in self.template for place in ("{numbers}", "{target}")):
            raise ConfigError(
                f"task: template = {self.template!r} must have {{numbers}} and {{target}}"
            )

    def train(self) -> Sequence[Prompt]:
        """The training problems."""
        return Generated(self.train_size, partial(self._prompt, "train"))

    def held_out(self) -> Sequence[Prompt]:
        """The held-out problems."""
        return Generated(self.held_out_size, partial(self._prompt, "held_out"))

    def _prompt(self, split: str, index: int) -> Prompt:
        kind = f"{self.min_numbers}-{self.max_numbers}/{self.max_number}/{self.max_target}"
        identity = f"countdown/{split}/{kind}/{index}"
        numbers, solution = self._problem(Random(identity), held_out=split == "held_out")
        return Prompt(
            id=identity,
            task=self.name,
            messages=asked(self._question(numbers, solution.value), self.system),
            target=str(solution.value),
            info={"numbers": numbers, "target": solution.value, "solution": solution.text},
        )

    def _question(self, numbers: Sequence[int], target: int) -> str:
        if not self.template:
            return question(numbers, target)
        listed = ", ".join(map(str, numbers))
        return self.template.replace("{numbers}", listed).replace("{target}", str(target))

    def _problem(self, random: Random, held_out: bool) -> tuple[list[int], Term]:
        while True:
            count = random.randint(self.min_numbers, self.max_numbers)
            numbers = [random.randint(1, self.max_number) for _ in range(count)]
            solution = solved(random, numbers)
            target = solution.value
            fits = target <= self.max_target and target not in numbers
            if fits and is_held_out(numbers, target) == held_out:
                return numbers, solution
