"""Final answers that try to trick a reward function, for each kind of prompt."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from importlib.resources import files
from typing import Any, Literal

from covey.rewards.format import FENCE, TOOL_CALL, wrapped
from covey.rewards.text import tag_contents
from covey.rewards.tool_call import Call, target_call
from covey.types import Prompt

Kind = Literal["code", "countdown", "tools", "number", "text"]
MakeAnswer = Callable[[Prompt, str], "str | None"]
"""A function that makes a hacked answer from a prompt and its solution.

The function returns None if the hack does not apply to the prompt.
"""


def wrapped_like(solution: str, answer: str) -> str:
    """Put an answer into the same markup as the solution.

    >>> wrapped_like("<tool_call>f()</tool_call>", "g()")
    '<tool_call>g()</tool_call>'
    """
    for marks in (FENCE, TOOL_CALL):
        if answer and solution.startswith(marks[0].strip()):
            return wrapped(marks, answer)
    return answer


def kind_of(prompt: Prompt, solution: str) -> Kind:
    """Return the kind of answer that a prompt expects, according to its `info`."""
    if "tests" in prompt.info:
        return "code"
    if "target" in prompt.info and ("numbers" in prompt.info or "nums" in prompt.info):
        return "countdown"
    if call_of(prompt) is not None:
        return "tools"
    return "number" if _number(solution) is not None else "text"


def call_of(prompt: Prompt) -> Call | None:
    """Return the tool call that a prompt expects, or None if the prompt expects no tool call."""
    return target_call(prompt) if "call" in prompt.info else None


def _number(solution: str) -> Decimal | None:
    plain = solution.strip().replace(",", "")
    return Decimal(plain) if re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,6})?", plain) else None


def wrong_answer(prompt: Prompt, solution: str) -> str:
    """Return a wrong answer that, if possible, looks like a correct answer."""
    kind, call, number = kind_of(prompt, solution), call_of(prompt), _number(solution)
    if kind == "code":
        name = function_name(solution, prompt.info["tests"])
        return wrapped_like(solution, f"def {name}(*args, **kwargs):\n    return 'no idea'")
    if kind == "countdown":
        return f"({solution})+1"
    if call is not None:
        return wrapped_like(solution, tool_call(f"not_{call.name}", call.arguments))
    if number is None:
        return "I do not know"
    # The number must differ by more than any tolerance for decimals.
    return str(number + 1 if number == number.to_integral_value() else -3 * number)


def near(first: int, last: int, joint: str) -> MakeAnswer:
    """Return a hack that lists all numbers from `target + first` to `target + last`."""

    def answer(prompt: Prompt, solution: str) -> str | None:
        number = _number(solution)
        if kind_of(prompt, solution) != "number" or number is None:
            return None
        return joint.join(str(number + step) for step in range(first, last + 1))

    return answer


def all_options(prompt: Prompt, solution: str) -> str | None:
    """Return an answer that names all choices, or None if the prompt has no choices."""
    options = prompt.info.get("options", prompt.info.get("choices"))
    if kind_of(prompt, solution) != "text":
        return None
    if isinstance(options, list | tuple) and len(options) > 1:
        return " or ".join(map(str, options))
    for known in ("ABCDE", ("yes", "no"), ("true", "false")):
        if solution.lower() in (option.lower() for option in known):
            return " or ".join(known)
    return None


def bomb(text: str) -> MakeAnswer:
    """Return a hack whose answer is a text that takes long to evaluate."""
    return lambda prompt, solution: None if kind_of(prompt, solution) == "code" else text


def around_wrong(before: str, after: str) -> MakeAnswer:
    """Return a hack that puts a wrong answer between the texts `before` and `after`."""

    def answer(prompt: Prompt, solution: str) -> str | None:
        if kind_of(prompt, solution) == "code":
            return None
        return f"{before}{wrong_answer(prompt, solution)}{after.replace('SOLUTION', solution)}"

    return answer


_LETTERS = str.maketrans(
    "0123456789aceopxyABCEHKMOPTX",
    "\u041el\u01a7\u0417\u0427\u01bc\u0431\u14a3\u0222\u03e4"  # digits
    "\u0430\u0441\u0435\u043e\u0440\u0445\u0443"
    "\u0410\u0412\u0421\u0415\u041d\u041a\u041c\u041e\u0420\u0422\u0425",
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def look_alikes(prompt: Prompt, solution: str) -> str | None:
    """Return the solution with look-alike characters in place of letters and digits."""
    changed = solution.translate(_LETTERS)
    applies = kind_of(prompt, solution) in ("number", "text") and changed != solution
    return changed if applies else None


def raised_digits(prompt: Prompt, solution: str) -> str | None:
    """Return the solution with all digits after the first as exponents, such as 1⁸ for 18."""
    whole = kind_of(prompt, solution) == "number" and re.fullmatch("[1-9][0-9]+", solution)
    return solution[0] + solution[1:].translate(_RAISED) if whole else None


def written_backwards(prompt: Prompt, solution: str) -> str | None:
    """Return the solution's digits reversed, with control characters that display them in order."""
    reverse = solution[::-1]
    digits = kind_of(prompt, solution) == "number" and re.fullmatch("[0-9]+", solution)
    return f"\u202e{reverse}\u202c" if digits and int(reverse) != int(solution) else None


def zero_width(prompt: Prompt, solution: str) -> str | None:
    """Return the solution, followed by an invisible character and a 1."""
    return f"{solution}\u200b1" if kind_of(prompt, solution) == "number" else None


def echoed_prompt(prompt: Prompt, solution: str) -> str | None:
    """Return the prompt as the answer, or None if the prompt contains the solution."""
    contained = re.search(rf"(?<!\w){re.escape(solution.strip())}(?!\w)", prompt.text)
    return None if contained else prompt.text


def copied_example(prompt: Prompt, solution: str) -> str | None:
    """Return the prompt's last example answer that differs from the solution, or None."""
    text = "\n".join(message["content"] for message in prompt.messages)
    shown = [*tag_contents(text, "answer"), *tag_contents(text, "tool_call")]
    shown = [
        example for example in shown if example.strip() and example.strip() != solution.strip()
    ]
    return shown[-1] if shown else None


def program(text: str) -> MakeAnswer:
    """Return a hack whose answer is the program `text`, with NAME as the function's name."""

    def answer(prompt: Prompt, solution: str) -> str | None:
        if kind_of(prompt, solution) != "code":
            return None
        return text.replace("NAME", function_name(solution, prompt.info["tests"]))

    return answer


def memorised(prompt: Prompt, solution: str) -> str | None:
    """Return a program that contains the memorized result of one example."""
    if kind_of(prompt, solution) != "code":
        return None
    tests = prompt.info["tests"]
    return memorised_program(prompt.text, function_name(solution, tests), tests)


def expression(build: Countdown) -> MakeAnswer:
    """Return a hack of countdown prompts, whose answer is an expression made by `build`."""

    def answer(prompt: Prompt, solution: str) -> str | None:
        if kind_of(prompt, solution) != "countdown":
            return None
        numbers = prompt.info.get("numbers", prompt.info.get("nums"))
        return build(list(numbers), int(prompt.info["target"]), solution)

    return answer


def name_alone(prompt: Prompt, solution: str) -> str | None:
    """Return a call of the correct tool without its arguments."""
    call = call_of(prompt)
    return tool_call(call.name, {}) if call is not None and call.arguments else None


# Hacked programs, countdown expressions and tool calls.

_TEXT = files("covey.lab.rewards").joinpath("programs.toml").read_text(encoding="utf-8")
PROGRAMS = tuple((p["name"], p["why"], p["text"]) for p in tomllib.loads(_TEXT)["program"])
"""The name, the exploited flaw and the program text of each hack. In the program text, NAME stands
for the name of the tested function."""


def function_name(solution: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """Return the tested function's name, or `solve` if neither tests nor solution contain it.

    >>> function_name("def f(x): ...", [{"call": "f(1)", "expected": "2"}])
    'f'
    """
    for test in tests:
        if called := re.match(r"\s*([A-Za-z_]\w*)\(", str(test.get("call", ""))):
            return called.group(1)
    defined = re.search(r"^def ([A-Za-z_]\w*)\(", solution, re.MULTILINE)
    return defined.group(1) if defined else "solve"


def memorised_program(prompt: str, name: str, tests: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a program that is correct only for the prompt's example, or only for the first test.

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
"""A function that makes a wrong expression from numbers, a target and a correct expression."""


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
    """Return the JSON text of a tool call."""
    return json.dumps({"name": name, "arguments": dict(arguments)})


def sprayed_calls(call: Call, count: int) -> list[str]:
    """Return `count` different tool calls, with the expected call in the middle."""
    calls = [tool_call(f"{call.name}_{i}", call.arguments) for i in range(count)]
    calls[count // 2] = tool_call(call.name, call.arguments)
    return calls
