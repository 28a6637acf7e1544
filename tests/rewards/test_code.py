from __future__ import annotations

import time
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.rewards.code import CodeTests, extract_program, parse_tests
from covey.rewards.score import Score
from covey.sandbox import Limits
from covey.sandbox import program as sandbox
from covey.types import Prompt

ISOLATED = not sandbox.isolation_problem()
CALLS = [
    {"call": "add(1, 2)", "expected": "3"},
    {"call": "add(-1, 1)", "expected": "0"},
    {"call": "add(0.1, 0.2)", "expected": "0.3"},
    {"call": "add('a', 'b')", "expected": "'ab'"},
]
LINES = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 -4", "stdout": "6"}]
RIGHT = "def add(a, b):\n    return a + b"


def prompt(tests: Any) -> Prompt:
    info = {} if tests is None else {"tests": tests}
    return Prompt(
        id="p", task="t", messages=({"role": "user", "content": "?"},), target="", info=info
    )


def judge(text: str, tests: Any = CALLS, **options: Any) -> Score:
    return CodeTests(unsafe=not ISOLATED, **options)(prompt(tests), text)


def fence(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


def score(passed: float, runs: float = 1.0) -> Score:
    parts = {"passed": passed, "runs": runs}
    return Score(reward=passed, success=passed == 1.0, parts=parts, attempted=runs == 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fence(RIGHT), score(1.0)),
        (fence("def add(a, b): return a + b if a != 'a' else 0"), score(0.75)),
        ("1. So:\n\n   ```py\n   def add(a, b):\n       return a + b\n   ```", score(1.0)),
        (fence("def add(a, b): return 3"), score(0.25)),
        (fence("def add(a, b): return a - b"), score(0.0)),
        (fence("def sub(a, b): return a - b"), score(0.0, runs=0.0)),
        (fence("def add(a, b) return a + b"), score(0.0, runs=0.0)),
        ("I cannot do that.", score(0.0, runs=0.0)),
        ("", score(0.0, runs=0.0)),
        ("<think>" + fence(RIGHT), score(0.0, runs=0.0)),
    ],
)
def test_the_reward_is_the_share_of_tests_passed(text: str, expected: Score) -> None:
    assert judge(text) == expected


def test_without_partial_only_all_is_worth_anything() -> None:
    almost = judge(fence("def add(a, b): return a + b if a != 'a' else 0"), partial=False)
    assert (almost.reward, almost.success, almost.parts["passed"]) == (0.0, False, 0.75)
    assert judge(fence(RIGHT), partial=False) == score(1.0)


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("import sys\na, b = sys.stdin.read().split()\nprint(int(a) + int(b), '  \\n\\n')", 1.0),
        (
            "def main(): print(sum(map(int, input().split())))\nif __name__ == '__main__': main()",
            1.0,
        ),
        ("print(3)", 0.5),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("print(sum(map(int, input().split())))\nprint('checked')", 0.0),
        ("input('Numbers: ')", 0.0),
    ],
)
def test_programs_that_read_and_write(program: str, passed: float) -> None:
    assert judge(fence(program), LINES).reward == passed


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (fence("x = 1"), "x = 1\n"),
        (fence("x = 1") + fence("x = 2"), "x = 2\n"),
        (fence("x = 1") + fence("output", "text"), "x = 1\n"),
        (fence("x = 1", "") + fence("x = 2", "text"), "x = 2\n"),
        (fence("x = 1", "Python3"), "x = 1\n"),
        (fence("x = 1", "python title=a.py"), "x = 1\n"),
        (fence("x = 1") + "```python\nx = 2", "x = 1\n"),
        ("<think>" + fence("x = 1") + "</think>" + fence("x = 2"), "x = 2\n"),
        ("<think>" + fence("x = 1") + "</think>x = 2", "x = 2"),
        ("<think>x</think><answer>x = 3</answer>", "x = 3"),
        ("<answer>" + fence("x = 4") + "</answer>", "x = 4\n"),
        ("<answer>x = 1</answer><answer>x = 2</answer>", "x = 2"),
        ("x = 5", "x = 5"),
        ("<think>x = 5", ""),
        ("```x = 1```", "```x = 1```"),
        ("  ```python\n  x = 1\n\n    y\n  ```", "x = 1\n\n  y\n"),
        ("1. So\n   ```python\n    x = 1\n   ```", " x = 1\n"),
        ("  ```python\nif x:\n  y = 1\n  ```", "if x:\n  y = 1\n"),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
    ],
)
def test_where_the_program_is_found(text: str, program: str) -> None:
    assert extract_program(text) == program


@pytest.mark.parametrize("piece", ["```python\n", "```\n", "`", "<", "<answer>", "<think>", "\n"])
def test_reading_hostile_text_takes_linear_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    extract_program(text)
    assert time.process_time() - began < 2


# None of these computes a result, so at most a chance result is correct.
CHEATS = {
    "equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 3
    def __repr__(self): return "3"
    __str__ = __repr__
def add(a, b): return Yes()
""",
    "a number equal to everything": """
class Yes(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    def __repr__(self): return "0.3"
def add(a, b): return Yes("nan")
""",
    "prints results": "def add(a, b): print(3); print('[true]'); return None",
    "exits": "import sys\nsys.exit(0)",
    "exits later": "import os\ndef add(a, b): os._exit(0)",
    "forges a report": "import os\nos.write(1, b'0 0 0.1 0 0 1\\n3')\nos._exit(0)",
    "patches the harness": """
import sys
frame = sys._getframe()
while frame:
    names = frame.f_globals
    for name in ("encode", "sequence", "matches", "write_all"):
        if name in names: names[name] = lambda *_: "true"
    frame = frame.f_back
def add(a, b): return object()
""",
    "patches the built-ins": """
import builtins
builtins.isinstance = lambda *_: True
builtins.eval = lambda *_: True
builtins.len = lambda *_: 0
def add(a, b): return "0"
""",
    "patches json and math": """
import json, math
json.loads = math.isclose = lambda *_, **__: True
def add(a, b): return object()
""",
    "raises nothing ever": "def add(a, b):\n    try: return a.nothing\n    finally: return ...",
    "kills the harness": "import os\nos.kill(os.getppid(), 9)\ndef add(a, b): return ...",
    "leaves results for later": """
import os
def add(a, b):
    for place in ("/tmp/r", "r"):
        try: open(place, "a").write("3")
        except OSError: pass
    return ...
""",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_cheating_gains_nothing(program: str) -> None:
    given = judge(fence(program))
    assert (given.reward, given.success) == (0.0, False)


def test_what_is_expected_is_nowhere_in_the_sandbox() -> None:
    program = """
import sys
def look():
    frame, seen = sys._getframe().f_back, ""
    while frame:
        seen += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    try: seen += open("/proc/self/cmdline").read() + open("/proc/self/environ").read()
    except OSError: pass
    return "look()" in seen, "yellow-" + "bird" in seen
"""
    tests = [
        {"call": "look()", "expected": "(True, False)"},
        {"call": "1", "expected": "'yellow-bird'"},
    ]
    assert judge(fence(program), tests).parts["passed"] == 0.5


HOSTILE = {
    "lone surrogate": fence("x = '\ud800'\n" + RIGHT),
    "NUL": fence("x = '\0'\n" + RIGHT),
    "a megabyte of <": "<" * 1_000_000,
    "a megabyte of (": fence("(" * 1_000_000),
    "deep": fence("x = " + "-" * 500_000 + "1"),
    "large constant": fence("x = (((9 ** 9) ** 9) ** 9) ** 9"),
    "long line": fence("x = '" + "x" * 1_000_000),
    "stops": fence("while True: pass"),
    "floods": fence("while True: print('x' * 1000)"),
    "crashes": fence("import os\nos.abort()"),
    "huge value": fence("def add(a, b): return 'x' * 50_000_000"),
    "deep value": fence(
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x"
    ),
    "round value": fence("def add(a, b):\n    x = []\n    x.append(x)\n    return x"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_raises_and_none_takes_long(text: str) -> None:
    began = time.monotonic()
    given = judge(text, seconds=0.5, total_seconds=1.0)
    assert time.monotonic() - began < 15
    assert (given.reward, given.success, given.parts["passed"]) == (0.0, False, 0.0)


def test_a_test_that_hangs_costs_only_itself() -> None:
    program = "def add(a, b):\n    while a == -1: pass\n    return a + b"
    assert judge(fence(program), seconds=0.5, total_seconds=10.0).reward == 0.75


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, r"info\['tests'\]"),
        ([], r"info\['tests'\]"),
        ("add(1, 2)", r"info\['tests'\]"),
        ([{}], "neither 'call' nor 'stdin'"),
        (["add(1, 2)"], "neither 'call' nor 'stdin'"),
        ([*CALLS, {"call": "add(1, 2)"}], r"\[4\] needs strings 'call' and 'expected'"),
        ([{"call": "add(1, 2)", "expected": 3}], "needs strings"),
        ([{"stdin": "1"}], "needs strings 'stdin' and 'stdout'"),
        ([{"call": "add(1, 2", "expected": "3"}], "cannot be used"),
        ([{"call": "x = 1", "expected": "3"}], "cannot be used"),
        ([{"call": "add(1, 2)", "expected": "three"}], "not a Python literal: 'three'"),
    ],
)
def test_a_prompt_without_usable_tests_is_an_error(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(fence(RIGHT), tests)


def test_tests_may_be_any_sequence() -> None:
    assert len(parse_tests({"tests": tuple(CALLS)})) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0.0}, "seconds = 0.0"),
        ({"seconds": 2.0, "total_seconds": 1.0}, "total_seconds = 1.0"),
        ({"seconds": float("nan")}, "seconds = nan"),
        ({"total_seconds": 1e9}, "at most 3600"),
        ({"memory_mb": 10}, "memory_mb = 10"),
    ],
)
def test_options_out_of_range_are_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^reward: .*{message}") as raised:
        CodeTests(unsafe=True, **options)
    assert len(str(raised.value).splitlines()) == 1


def test_missing_isolation_is_an_error_before_the_first_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox.isolation_problem.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    try:
        with pytest.raises(ConfigError, match=r"apt install bubblewrap.*unsafe = true"):
            CodeTests()
        assert CodeTests(unsafe=True)(prompt(CALLS), fence(RIGHT)) == score(1.0)
    finally:
        sandbox.isolation_problem.cache_clear()


def test_the_options_are_the_limits() -> None:
    reward = CodeTests(unsafe=True, seconds=1.5, total_seconds=7.0, memory_mb=100)
    assert reward._limits() == Limits(
        cpu_seconds=2, wall_seconds=1.5, total_seconds=7.0, memory_bytes=100 << 20
    )
    assert (reward.bounds, reward.quick, reward.version) == ((0.0, 1.0), False, 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (RIGHT, ()),
        ("def add(a, b): return 3", ("call add(-1, 1) must give 0", "the result is different")),
        ("def sub(a, b): return 3", ("call add(1, 2) must give 3", "name 'add' is not defined")),
    ],
)
def test_the_feedback_names_the_first_test_that_fails(program: str, words: tuple[str, ...]) -> None:
    feedback = judge(fence(program)).feedback
    assert bool(feedback) == bool(words)
    assert all(word in feedback for word in words)
