"""The `countdown` task: reach a target with given numbers, such as 27 = 12 + 5 * 3.

Every problem has a solution, because the generator makes the solution first. The generator combines
pairs of numbers with `+`, `-`, `*` or `/` until one number is left, which is the target. All
intermediate results are positive integers.

A hash of the sorted numbers and the target decides the split. No held-out problem has both the
numbers and the target of a training problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import GeneratedTask, chat_messages, hash_fraction
from covey.types import Prompt

HELD_OUT_SHARE = 0.2
REGROUPING = {("-", "+"), ("-", "-"), ("/", "*"), ("/", "/")}
"""Operator pairs (first, second) for which `a first (b second c)` needs the parentheses."""


@dataclass(frozen=True, slots=True)
class Term:
    """An expression as text, with its integer value and its outermost operator."""

    value: int
    text: str
    operator: str = ""

    def within(self, operator: str, right: bool) -> str:
        """Return the expression as an operand of `operator`, in parentheses only if needed."""
        below_product = self.operator in ("+", "-") and operator in ("*", "/")
        regroups = right and (operator, self.operator) in REGROUPING
        return f"({self.text})" if below_product or regroups else self.text


def join(left: Term, right: Term, operator: str) -> Term | None:
    """Combine two terms by an operator; return None if the result is not a positive integer.

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
    """Join all numbers into one term, in random order and with random operators."""
    terms = [Term(n, str(n)) for n in numbers]
    while len(terms) > 1:
        left = terms.pop(random.randrange(len(terms)))
        right = terms.pop(random.randrange(len(terms)))
        # A sum is always possible, so the loop ends.
        joined = None
        while joined is None:
            operator = random.choice("+-*/")
            # Without the swap, differences and quotients would be rare.
            swap = operator in "-/" and left.value < right.value
            joined = join(right, left, operator) if swap else join(left, right, operator)
        terms.append(joined)
    return terms[0]


def prompt_text(numbers: Sequence[int], target: int) -> str:
    listed = ", ".join(map(str, numbers[:-1]))
    return (
        f"Write an arithmetic expression whose value is {target}. Use each of the numbers "
        f"{listed} and {numbers[-1]} exactly once, and no others, with +, -, *, / and parentheses. "
        "Show your thinking between <think> and </think>, and give the final expression between "
        "<answer> and </answer>, such as <answer>(1 + 2) / 3</answer>."
    )


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Return whether a problem is held out; the seed and the order of numbers have no effect."""
    return hash_fraction(f"{sorted(numbers)} {target}") < HELD_OUT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown(GeneratedTask):
    """Each problem asks for an expression that uses the given numbers and equals a target.

    Problems with more numbers are harder. `template` replaces the default text of the prompt, and
    has the placeholders `{numbers}` and `{target}`. `system` is the system message.

    To use a dataset instead of the generator, use the task `jsonl` or `hub`. For a dataset with the
    columns `nums` and `target`, set the options `columns = {nums = "numbers", target = "target"}`
    and `template = "Make {target} out of {nums} ..."`.
    """

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 99
    max_target: int = 999
    template: str = ""
    system: str = ""
    name: str = "countdown"

    def __post_init__(self) -> None:
        GeneratedTask.__post_init__(self)
        if not 3 <= self.min_numbers <= self.max_numbers <= 6:
            raise ConfigError(
                f"task: min_numbers = {self.min_numbers} and max_numbers = {self.max_numbers} must "
                "satisfy 3 <= min_numbers <= max_numbers <= 6"
            )
        if self.max_number < 10 or self.max_target < 20:
            raise ConfigError(
                f"task: max_number = {self.max_number} must be at least 10, and max_target = "
                f"{self.max_target} must be at least 20"
            )
        if self.template and not all(place in self.template for place in ("{numbers}", "{target}")):
            raise ConfigError(
                f"task: the option template = {self.template!r} must contain {{numbers}} and "
                "{target}"
            )

    def _prompt(self, split: str, index: int) -> Prompt:
        kind = f"{self.min_numbers}-{self.max_numbers}/{self.max_number}/{self.max_target}"
        identity = f"countdown/{split}/{kind}/{index}"
        numbers, solution = self._problem(Random(identity), held_out=split == "held_out")
        text = prompt_text(numbers, solution.value)
        if self.template:
            text = self.template.replace("{numbers}", ", ".join(map(str, numbers)))
            text = text.replace("{target}", str(solution.value))
        return Prompt(
            id=identity,
            task=self.name,
            messages=chat_messages(text, self.system),
            target=str(solution.value),
            info={"numbers": numbers, "target": solution.value, "solution": solution.text},
        )

    def _problem(self, random: Random, held_out: bool) -> tuple[list[int], Term]:
        while True:
            count = random.randint(self.min_numbers, self.max_numbers)
            numbers = [random.randint(1, self.max_number) for _ in range(count)]
            solution = solved(random, numbers)
            target = solution.value
            fits = target <= self.max_target and target not in numbers
            if fits and is_held_out(numbers, target) == held_out:
                return numbers, solution
