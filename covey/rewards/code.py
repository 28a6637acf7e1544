"""The code reward: the fraction of tests that the completion's program passes in a sandbox."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.rewards.score import Score, TargetReward, check_option
from covey.rewards.text import after_thinking, answers_differ, tag_contents
from covey.sandbox import (
    Case,
    Limits,
    Outcome,
    matches,
    read_expected,
    require_isolation,
    run_program,
    same_output,
)
from covey.types import Prompt

MAX_FEEDBACK = 1000
"""Maximum length of the feedback on a program, in characters."""
_FENCE = "```"
_PYTHON = ("python", "python3", "py")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of every closed fenced block.

    Fenced blocks in Markdown lists are indented, so the common indent of a block's lines is
    removed.

    >>> fenced_blocks("So:\\n```python\\nx = 1\\n```\\n```\\nopen")
    [('python', 'x = 1\\n')]
    >>> fenced_blocks("1. So:\\n   ```\\n   if x:\\n       y\\n   ```")
    [('', 'if x:\\n    y\\n')]
    """
    blocks = []
    opened = ""
    fence = 0
    lines: list[str] | None = None
    for line in text.split("\n"):
        bare = line.strip()
        if lines is None:
            if bare.startswith(_FENCE) and "`" not in bare[3:]:
                opened, lines = bare[3:].strip().partition(" ")[0].lower(), []
                fence = _indent(line)
        elif bare == _FENCE:
            common = min([fence, *(_indent(line) for line in lines if line.strip())])
            blocks.append((opened, "".join(f"{line[common:]}\n" for line in lines)))
            lines = None
        else:
            lines.append(line)
    return blocks


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def extract_program(text: str) -> str:
    """Return the program of a completion: the last Python block after the thinking.

    If the text has `<answer>` tags, only the content of the last `<answer>` counts. If the text has
    no Python block, the program is the last fenced block. If the text has no fenced block at all,
    the program is the whole text after the thinking or inside `<answer>`.
    """
    rest = after_thinking(text)
    answer = [rest, *tag_contents(rest, "answer")][-1]
    blocks = fenced_blocks(answer)
    python = [content for language, content in blocks if language in _PYTHON]
    others = [content for _, content in blocks]
    return [answer, *others, *python][-1]


def parse_tests(info: Mapping[str, Any]) -> list[tuple[Case, object]]:
    """Return the sandbox input and the expected result of each test.

    Raises ValueError if a prompt's tests are missing or malformed.
    """
    tests = info.get("tests")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError("code_tests needs prompts with a list of tests in info['tests']")
    return [_parse_test(number, test) for number, test in enumerate(tests)]


def _parse_test(number: int, test: Any) -> tuple[Case, object]:
    for given, wanted in (("call", "expected"), ("stdin", "stdout")):
        if isinstance(test, Mapping) and given in test:
            if not isinstance(test[given], str) or not isinstance(test.get(wanted), str):
                raise ValueError(f"info['tests'][{number}] needs strings {given!r} and {wanted!r}")
            break
    else:
        raise ValueError(f"info['tests'][{number}] has neither 'call' nor 'stdin'")
    if given == "stdin":
        return Case(stdin=test["stdin"]), test["stdout"]
    try:
        ast.parse(test["call"], mode="eval")
        return Case(call=test["call"]), read_expected(test["expected"])
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"info['tests'][{number}] cannot be used: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests(TargetReward):
    """The fraction of tests that the program passes.

    With `partial = false`, the reward is 1 if the program passes all tests, and otherwise 0.

    A test of a function has the keys `call` (such as `add(1, 2)`) and `expected` (a Python literal
    such as `3`). A test of a program has the keys `stdin` and `stdout`. The program never sees the
    expected values, because results are compared outside the sandbox.
    """

    partial: bool = True
    seconds: float = 4.0
    """Time limit of each test, in seconds."""
    total_seconds: float = 20.0
    """Time limit of all tests of a completion together, in seconds. A test that does not start
    within `total_seconds` fails."""
    memory_mb: int = 512
    unsafe: bool = False
    """Whether to run programs as ordinary processes of this user, without the sandbox."""

    quick: ClassVar[bool] = False
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        TargetReward.__post_init__(self)
        check_option(
            0 < self.seconds <= self.total_seconds <= 3600,
            f"seconds = {self.seconds} must be positive and at most total_seconds = "
            f"{self.total_seconds}, which must be at most 3600",
        )
        check_option(
            64 <= self.memory_mb <= 1 << 20,
            f"memory_mb = {self.memory_mb} must be at least 64 and at most 1048576",
        )
        if not self.unsafe:
            require_isolation()

    @property
    def max_seconds(self) -> float:
        """The time limit of all tests, plus one second to start and stop the sandbox."""
        return self.total_seconds + 1.0

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion. Raises ValueError if the prompt has no tests."""
        if not prompt.info.get("tests") and self.without_target != "error":
            return self.neutral(f"prompt {prompt.id!r} has no tests", ("passed", "runs"))
        tests = parse_tests(prompt.info)
        program = extract_program(text)
        if not program.strip() or answers_differ(tag_contents(after_thinking(text), "answer")):
            parts = {"passed": 0.0, "runs": 0.0}
            return Score(reward=0.0, success=False, parts=parts, attempted=False)
        outcomes = run_program(
            program, [case for case, _ in tests], limits=self._limits(), unsafe=self.unsafe
        )
        correct = [
            passes(case, expected, outcome)
            for (case, expected), outcome in zip(tests, outcomes, strict=True)
        ]
        passed, success = sum(correct), all(correct)
        first = 0 if success else correct.index(False)
        runs = any(outcome.ran for outcome in outcomes)
        return Score(
            reward=passed / len(tests) if self.partial else float(success),
            success=success,
            parts={"passed": passed / len(tests), "runs": float(runs)},
            attempted=runs,
            feedback="" if success else _failure(prompt.info["tests"][first], outcomes[first]),
        )

    def _limits(self) -> Limits:
        return Limits(
            cpu_seconds=int(self.seconds) + 1,
            wall_seconds=self.seconds,
            total_seconds=self.total_seconds,
            memory_bytes=self.memory_mb << 20,
        )


def _failure(test: Mapping[str, Any], outcome: Outcome) -> str:
    given, wanted = ("call", "expected") if "call" in test else ("stdin", "stdout")
    error = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    how = error if error else "the result is different" if outcome.ran else outcome.ended
    return f"{given} {test[given]} must give {test[wanted]}: {how}"[:MAX_FEEDBACK]


def passes(case: Case, expected: object, outcome: Outcome) -> bool:
    if not outcome.ran:
        return False
    if case.call is None:
        assert isinstance(expected, str)
        return same_output(expected, outcome.stdout)
    return matches(expected, outcome.value)
