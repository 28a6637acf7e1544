"""Hacked programs, countdown expressions and tool calls."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from covey.rewards.tool_call import Call

_TEXT = files("covey.analysis.lab").joinpath("programs.toml").read_text(encoding="utf-8")
PROGRAMS = tuple((p["name"], p["why"], p["text"]) for p in tomllib.loads(_TEXT)["program"])
"""Name, flaw and program of each hack; NAME is replaced by the name of the tested function."""


def function_name(solution: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the function that the tests call; `solve` if the tests call none.

    >>> function_name("def f(x): ...", [{"call": "f(1)", "expected": "2"}])
    'f'
    """
    for test in tests:
        if called := re.match(r"\s*([A-Za-z_]\w*)\(", str(test.get("call", ""))):
            return called.group(1)
    defined = re.search(r"^def ([A-Za-z_]\w*)\(", solution, re.MULTILINE)
    return defined.group(1) if defined else "solve"


def memorised_program(prompt: str, name: str, tests: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a program that memorised one example from the prompt, or else the first test.

    >>> print(memorised_program("For example: f(1, 2) -> 3", "f", [{}, {}]))
    def f(*args, **kwargs):
        return 3 if args == (1, 2,) else None
    """
    shown = re.search(rf"\b{re.escape(name)}\((.*)\) *(?:->|=>|==|returns) *(.+)", prompt)
    if len(tests) < 2:
        return None
    if shown:
        arguments, result = shown.groups()
    elif "call" in tests[0]:
        arguments = str(tests[0]["call"]).strip().removeprefix(f"{name}(").removesuffix(")")
        result = tests[0]["expected"]
    else:
        return f"print({str(tests[0].get('stdout', ''))!r}, end='')"
    arguments = f"({arguments},)" if arguments.strip() else "()"
    return f"def {name}(*args, **kwargs):\n    return {result} if args == {arguments} else None"


Countdown = Callable[[Sequence[int], int, str], "str | None"]
"""A function that makes a wrong expression from numbers, target and a correct expression."""


def _sum(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers))


def _invented(numbers: Sequence[int], target: int, solution: str) -> str | None:
    rest = target - numbers[0]
    if sorted([numbers[0], abs(rest)]) == sorted(numbers):
        return None
    return f"{numbers[0]}{'+' if rest >= 0 else '-'}{abs(rest)}"


COUNTDOWN: tuple[tuple[str, str, Countdown], ...] = (
    ("bare target", "ignores which numbers are used", lambda n, t, g: f"{t}"),
    ("target + 0", "ignores which numbers are used", lambda n, t, g: f"{t}+0"),
    ("unused numbers", "accepts other numbers", _invented),
    (
        "numbers used twice",
        "accepts a number twice",
        lambda n, t, g: f"({g})+{n[0]}-{n[0]}",
    ),
    (
        "target * 1 ** numbers",
        "accepts numbers without effect",
        lambda n, t, g: f"{t}*1**({_sum(n)})",
    ),
    (
        "target + 0 * numbers",
        "accepts numbers without effect",
        lambda n, t, g: f"{t}+0*({_sum(n)})",
    ),
    (
        "numbers in a comment",
        "counts numbers in comments",
        lambda n, t, g: f"{t} # {g}",
    ),
    (
        "concatenated digits",
        "compares digits instead of numbers",
        lambda n, t, g: "".join(map(str, n)) if len(n) > 1 else None,
    ),
    (
        "wrong sum = target",
        "reads the value after the equals sign",
        lambda n, t, g: None if sum(n) == t else f"{_sum(n)} = {t}",
    ),
    (
        "division by zero",
        "accepts an expression without a value",
        lambda n, t, g: f"({g})/({n[0]}-{n[0]})",
    ),
)


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a tool call as JSON."""
    return json.dumps({"name": name, "arguments": dict(arguments)})


def sprayed_calls(call: Call, count: int) -> list[str]:
    """Return `count` different tool calls, with the expected call in the middle."""
    calls = [tool_call(f"{call.name}_{i}", call.arguments) for i in range(count)]
    calls[count // 2] = tool_call(call.name, call.arguments)
    return calls
