"""The `code_repair` environment: the policy tests and edits a wrong program.

The prompts come from the `code` task, or from any data with `info["tests"]`. The wrong program is
`info["broken"]`. Without `info["broken"]`, Covey inserts one small error into the solution.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from covey.environments.environment import Start, Step, appended
from covey.environments.python import Programs
from covey.environments.tool_environment import ToolEnvironment, ToolError
from covey.errors import ConfigError
from covey.rewards.code import extract_program, parse_tests, passes
from covey.rewards.text import shortened
from covey.sandbox import Case, Outcome
from covey.types import Message, Prompt

RULES = """\
This program is meant to do that, but has an error:

```python
{program}```

Use run_tests to see which tests fail, and edit or rewrite to correct the program. You can run the \
tests {rounds} times. Other tests, which you cannot see, count too. When the program is correct, \
answer without a call."""
TESTS, EDITS, ROUNDS = 0.75, 0.125, 0.125
"""Weights of the reward's terms: for passed tests, for few edits, and for few test rounds."""
Test = tuple[Case, object]


class CodeRepair(ToolEnvironment):
    """An environment with tools to edit a program and to test it up to `max_rounds` times.

    The main part of the reward is 0.75 times the fraction of all tests that the final program
    passes. A program that passes all tests additionally gets two bonuses of up to 0.125 each. The
    bonus for few edits is 0.125 for up to `expected_edits` edits, and falls linearly to 0 at twice
    as many edits. The bonus for few test rounds falls by 0.125 / `max_rounds` with each round after
    the first. A correct program therefore gets a reward of at least 0.75, and an incorrect program
    gets less.
    """

    def __init__(
        self,
        *,
        max_rounds: int = 5,
        expected_edits: int = 3,
        hidden_tests: int = 2,
        seconds: float = 2.0,
        memory_mb: int = 512,
        output_chars: int = 1500,
        unsafe: bool = False,
    ) -> None:
        for name, value in (("max_rounds", max_rounds), ("expected_edits", expected_edits)):
            if value < 1:
                raise ConfigError(f"environment: {name} = {value} must be at least 1")
        if hidden_tests < 0:
            raise ConfigError(f"environment: hidden_tests = {hidden_tests} must not be negative")
        self._max_rounds, self._expected_edits = max_rounds, expected_edits
        self._hidden_tests = hidden_tests
        self._programs = Programs(
            seconds=seconds, memory_mb=memory_mb, output_chars=output_chars, unsafe=unsafe
        )
        self._program = ""
        self._tests: list[Test] = []
        self._rounds = self._edits = 0

    @property
    def _visible(self) -> list[Test]:
        return self._tests[: max(1, len(self._tests) - self._hidden_tests)]

    async def reset(self, prompt: Prompt, seed: int) -> Start:  # type: ignore[override]
        """Start the episode: show the problem and a program that fails a visible test."""
        self._tests = parse_tests(prompt.info)
        self._program = await self._broken(prompt, seed)
        rules = RULES.format(program=self._program, rounds=self._max_rounds)
        start = super().reset(prompt, seed)
        return replace(start, messages=appended(prompt.messages, f"\n\n{rules}"))

    async def _broken(self, prompt: Prompt, seed: int) -> str:
        if "broken" in prompt.info:
            return str(prompt.info["broken"])
        solution = extract_program(str(prompt.info.get("solution", "")))
        for program in mutants(solution, Random(seed)):
            outcomes = await self._programs.run(program, [case for case, _ in self._visible])
            # An endless program would use its whole time limit in every round.
            ended = all(outcome.ended == "exited" for outcome in outcomes)
            if ended and not all(_results(self._visible, outcomes)):
                return program
        raise ValueError(
            f"prompt {prompt.id}: code_repair needs info['broken'], or info['solution'] with a "
            "program that a small error breaks"
        )

    async def step(self, message: Message) -> Step:
        """Run the tool calls of a message; the episode ends after `max_rounds` test rounds."""
        step = await super().step(message)
        return replace(step, done=step.done or self._rounds >= self._max_rounds)

    async def run_tests(self) -> str:
        """Run the tests that you may see, and return those that fail."""
        if self._rounds >= self._max_rounds:
            raise ToolError(f"the tests have been run {self._max_rounds} times")
        self._rounds += 1
        # A test of a function also prints the value of its call.
        printing = "(lambda value: (print(repr(value)), value)[1])({})"
        cases = [
            replace(case, call=None if case.call is None else printing.format(case.call))
            for case, _ in self._visible
        ]
        outcomes = await self._programs.run(self._program, cases)
        results = _results(self._visible, outcomes)
        failures = [
            self._failure(test, outcome)
            for test, outcome, passed in zip(self._visible, outcomes, results, strict=True)
            if not passed
        ]
        return "\n\n".join([f"{sum(results)} of {len(results)} tests pass.", *failures])

    def edit(self, old: str, new: str) -> str:
        """Replace a part of the program.

        Args:
            old: The part, exactly as it stands there; it must occur once.
            new: What stands there instead.
        """
        count = self._program.count(old) if old else 0
        if count != 1:
            raise ToolError(f"the program has {count} places with this text, not one")
        return self._changed(self._program.replace(old, new))

    def rewrite(self, program: str) -> str:
        """Replace the whole program.

        Args:
            program: The new program.
        """
        return self._changed(program)

    def _changed(self, program: str) -> str:
        self._edits += 1
        self._program = program
        return "The program has been changed."

    def _failure(self, test: Test, outcome: Outcome) -> str:
        case, expected = test
        asked = f"{case.call} should return {expected!r}"
        if case.call is None:
            asked = f"For this input:\n{case.stdin}\nit should print:\n{expected}"
        lines = self._programs.shown(outcome).split("\n")
        lines = [line for line in lines if not line.startswith('  File "<harness>"')]
        given = "\n".join(lines) or "(nothing)"
        return f"{shortened(asked, 1000)}\nIt gave:\n{given}"

    async def reward(self) -> dict[str, float]:
        outcomes = await self._programs.run(self._program, [case for case, _ in self._tests])
        results = _results(self._tests, outcomes)
        solved = float(all(results))
        extra = max(0, self._edits - self._expected_edits) / self._expected_edits
        used = max(0, self._rounds - 1) / self._max_rounds
        return {
            "tests": TESTS * sum(results) / len(results),
            "edits": EDITS * solved * max(0.0, 1.0 - extra),
            "rounds": ROUNDS * solved * (1.0 - used),
        }


def _results(tests: Sequence[Test], outcomes: Sequence[Outcome]) -> list[bool]:
    return [
        passes(case, expected, outcome)
        for (case, expected), outcome in zip(tests, outcomes, strict=True)
    ]


# Inserts small errors into Python programs, such as `<` in place of `<=`.

_OPERATORS: dict[type[ast.AST], Callable[[], Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_CALLED = {
    "min": "max", "max": "min", "sum": "max", "any": "all", "all": "any", "sorted": "list",
    "reversed": "list", "abs": "int", "list": "set",
}  # fmt: skip


def mutants(program: str, random: Random) -> Iterator[str]:
    """Yield copies of a program, each with one small error, in random order.

    Raise SyntaxError if the program is not valid Python.
    """
    tree = ast.parse(program)
    places = [place for place, node in enumerate(ast.walk(tree)) if _mutate(copy.deepcopy(node))]
    random.shuffle(places)
    for place in places:
        changed = copy.deepcopy(tree)
        _mutate(list(ast.walk(changed))[place])
        yield ast.unparse(changed) + "\n"


def _mutate(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return _mutate_constant(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        node.ops[0] = _OPERATORS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in _OPERATORS:
        node.op = _OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Name) and node.id in _CALLED:
        node.id = _CALLED[node.id]
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        node.args[:2] = node.args[1::-1]
    elif isinstance(node, ast.comprehension) and node.ifs:
        node.ifs.clear()
    else:
        return False
    return True


def _mutate_constant(node: ast.Constant) -> bool:
    if isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node.value, int):
        node.value += 1
    elif isinstance(node.value, str) and node.value:
        node.value = node.value[:-1]
    else:
        return False
    return True
