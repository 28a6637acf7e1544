from __future__ import annotations

import ast
import contextlib
import io
import sys
from typing import Any

import pytest

from covey.tasks.code import Code
from covey.types import Prompt

PROBLEMS = {p.target: p for p in [*Code().train(), *Code().held_out()]}
PROGRAMS = [name for name, p in PROBLEMS.items() if "stdin" in p.info["tests"][0]]


def solution_of(prompt: Prompt) -> str:
    text = prompt.info["solution"]
    assert text.startswith("```python\n")
    assert text.endswith("\n```")
    return text.removeprefix("```python\n").removesuffix("```")


def passed(code: str, test: dict[str, str]) -> bool:
    space: dict[str, Any] = {"__name__": "__main__"}
    if "call" in test:
        exec(code, space)
        return bool(eval(test["call"], space) == ast.literal_eval(test["expected"]))
    before, out = sys.stdin, io.StringIO()
    sys.stdin = io.StringIO(test["stdin"])
    try:
        with contextlib.redirect_stdout(out):
            exec(code, space)
    finally:
        sys.stdin = before
    return out.getvalue() == test["stdout"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_solution_passes_all_tests(name: str) -> None:
    prompt = PROBLEMS[name]
    tests = prompt.info["tests"]
    assert 4 <= len(tests) <= 8
    assert [t for t in tests if not passed(solution_of(prompt), t)] == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_constant_passes_all_tests(name: str) -> None:
    tests = PROBLEMS[name].info["tests"]
    for wanted in tests:
        if "call" in wanted:
            code = f"def {name}(*_): return {wanted['expected']}"
        else:
            code = f"print({wanted['stdout']!r}, end='')"
        assert passed(code, wanted)
        assert [t for t in tests if not passed(code, t)] != []


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_prompt_shows_the_signature_and_none_of_the_tests(name: str) -> None:
    prompt = PROBLEMS[name]
    text = prompt.text
    for test in prompt.info["tests"]:
        if "call" in test:
            assert test["call"].startswith(f"{name}(")
            assert f"{test['call']} -> " not in text
        else:
            assert f"input:\n\n    {test['stdin'].strip()}\n\ngives" not in text
    if name in PROGRAMS:
        assert "standard input" in text
    else:
        assert f"    def {name}(" in text
        assert 1 <= text.count(" -> ") - 1 <= 2
    assert "```python" in text


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_examples_that_are_shown_hold(name: str) -> None:
    prompt = PROBLEMS[name]
    shown = prompt.text.partition("For example")[2]
    if name in PROGRAMS:
        given, _, wanted = shown.partition("gives this output:")
        lines = [
            [x[4:] for x in part.split("\n") if x.startswith("    ")] for part in (given, wanted)
        ]
        stdin, stdout = ("".join(f"{x}\n" for x in part) for part in lines)
        assert passed(solution_of(prompt), {"stdin": stdin, "stdout": stdout})
        return
    for line in shown.split("\n"):
        if line.startswith(f"    {name}("):
            call, _, expected = line.rpartition(" -> ")
            assert passed(solution_of(prompt), {"call": call.strip(), "expected": expected})


def test_there_are_enough_problems_and_about_one_in_four_is_held_out() -> None:
    train, held_out = Code().train(), Code().held_out()
    assert (len(train), len(held_out)) == (35, 13)
    assert len(PROBLEMS) == 48
    assert len({p.id for p in [*train, *held_out]}) == 48
    assert len(PROGRAMS) >= 6
    assert {p.target for p in held_out} & set(PROGRAMS) != set()


def test_instruction_and_system_are_as_given() -> None:
    prompt = Code(system="S", instruction="").train()[0]
    assert prompt.messages[0] == {"role": "system", "content": "S"}
    assert "```" not in prompt.text
