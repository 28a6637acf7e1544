"""What a cheat puts in place of the answer, for any kind of prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Literal

from covey.analysis.lab.task_hacks import (
    Countdown,
    function_name,
    known_by_heart,
    tool_call,
    wrong_call,
    wrong_program,
)
from covey.rewards.text import inside
from covey.rewards.tool_call import Call, wanted_call
from covey.types import Prompt

Kind = Literal["code", "countdown", "tools", "number", "text"]
Answer = Callable[[Prompt, str], "str | None"]
"""From a prompt and the content of its gold answer to a hack's; None: not for this prompt."""


FENCE, END_OF_FENCE = "```python\n", "\n```"


def wrapped(opening: str, answer: str, closing: str) -> str:
    """Return the answer between two marks, unless it has them already, as worked solutions may."""
    return answer if answer.startswith(opening.strip()) else f"{opening}{answer}{closing}"


def dressed_like(gold: str, answer: str) -> str:
    """Return an answer with the marks around it that the gold one has.

    >>> dressed_like("<tool_call>f()</tool_call>", "g()")
    '<tool_call>g()</tool_call>'
    """
    for opening, closing in ((FENCE, END_OF_FENCE), ("<tool_call>", "</tool_call>")):
        if answer and gold.startswith(opening.strip()):
            return wrapped(opening, answer, closing)
    return answer


def kind_of(prompt: Prompt, gold: str) -> Kind:
    """Return what sort of answer a prompt wants, by what its `info` holds."""
    if "tests" in prompt.info:
        return "code"
    if "target" in prompt.info and ("numbers" in prompt.info or "nums" in prompt.info):
        return "countdown"
    if call_of(prompt) is not None:
        return "tools"
    return "number" if _number(gold) is not None else "text"


def call_of(prompt: Prompt) -> Call | None:
    """Return the call that comes with a prompt, as an object or as text."""
    return wanted_call(prompt) if "call" in prompt.info else None


def _number(gold: str) -> Decimal | None:
    plain = gold.strip().replace(",", "")
    return Decimal(plain) if re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,6})?", plain) else None


def wrong_answer(prompt: Prompt, gold: str) -> str:
    """Return an answer that is wrong, and looks like a right one where that is possible."""
    kind, call, number = kind_of(prompt, gold), call_of(prompt), _number(gold)
    if kind == "code":
        return dressed_like(gold, wrong_program(function_name(gold, prompt.info["tests"])))
    if kind == "countdown":
        return f"({gold})+1"
    if call is not None:
        return dressed_like(gold, wrong_call(call))
    if number is None:
        return "I do not know"
    # Far enough from a decimal that no tolerance reaches it.
    return str(number + 1 if number == number.to_integral_value() else -3 * number)


def near(first: int, last: int, joint: str) -> Answer:
    """Return the numbers from gold + first to gold + last."""

    def answer(prompt: Prompt, gold: str) -> str | None:
        number = _number(gold)
        if kind_of(prompt, gold) != "number" or number is None:
            return None
        return joint.join(str(number + step) for step in range(first, last + 1))

    return answer


def all_options(prompt: Prompt, gold: str) -> str | None:
    """Return every choice there is."""
    options = prompt.info.get("options", prompt.info.get("choices"))
    if kind_of(prompt, gold) != "text":
        return None
    if isinstance(options, list | tuple) and len(options) > 1:
        return " or ".join(map(str, options))
    for known in ("ABCDE", ("yes", "no"), ("true", "false")):
        if gold.lower() in (option.lower() for option in known):
            return " or ".join(known)
    return None


def bomb(text: str) -> Answer:
    """Return a text that is dear to evaluate; what programs can do is another matter."""
    return lambda prompt, gold: None if kind_of(prompt, gold) == "code" else text


def around_wrong(before: str, after: str) -> Answer:
    """Return the wrong answer between two texts; GOLD in the second is the right one."""

    def answer(prompt: Prompt, gold: str) -> str | None:
        if kind_of(prompt, gold) == "code":
            return None
        return f"{before}{wrong_answer(prompt, gold)}{after.replace('GOLD', gold)}"

    return answer


_LETTERS = str.maketrans(
    "0123456789aceopxyABCEHKMOPTX",
    "\u041el\u01a7\u0417\u0427\u01bc\u0431\u14a3\u0222\u03e4"  # digits
    "\u0430\u0441\u0435\u043e\u0440\u0445\u0443"
    "\u0410\u0412\u0421\u0415\u041d\u041a\u041c\u041e\u0420\u0422\u0425",
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def look_alikes(prompt: Prompt, gold: str) -> str | None:
    """Return the answer in letters that only look like its own."""
    changed = gold.translate(_LETTERS)
    return changed if kind_of(prompt, gold) in ("number", "text") and changed != gold else None


def raised_digits(prompt: Prompt, gold: str) -> str | None:
    """Return a power whose digits, laid flat, are the answer: 1⁸ for 18."""
    whole = kind_of(prompt, gold) == "number" and re.fullmatch("[1-9][0-9]+", gold)
    return gold[0] + gold[1:].translate(_RAISED) if whole else None


def written_backwards(prompt: Prompt, gold: str) -> str | None:
    """Return the digits backwards, between marks that make a screen show them forwards."""
    digits = kind_of(prompt, gold) == "number" and re.fullmatch("[0-9]+", gold)
    return f"\u202e{gold[::-1]}\u202c" if digits and int(gold[::-1]) != int(gold) else None


def zero_width(prompt: Prompt, gold: str) -> str | None:
    """Return ten times the answer and one, with an invisible gap before the last digit."""
    return f"{gold}\u200b1" if kind_of(prompt, gold) == "number" else None


def echoed_question(prompt: Prompt, gold: str) -> str | None:
    """Return the question."""
    # A question that holds the answer would be right by chance.
    held = re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", prompt.text)
    return None if held else prompt.text


def copied_example(prompt: Prompt, gold: str) -> str | None:
    """Return the example answer that the prompt shows."""
    told = "\n".join(message["content"] for message in prompt.messages)
    shown = [*inside(told, "answer"), *inside(told, "tool_call")]
    shown = [example for example in shown if example.strip() and example.strip() != gold.strip()]
    return shown[-1] if shown else None


def program(text: str) -> Answer:
    """Return a program with the wanted function's name in it."""

    def answer(prompt: Prompt, gold: str) -> str | None:
        if kind_of(prompt, gold) != "code":
            return None
        return text.replace("NAME", function_name(gold, prompt.info["tests"]))

    return answer


def by_heart(prompt: Prompt, gold: str) -> str | None:
    """Return a program that knows one example."""
    if kind_of(prompt, gold) != "code":
        return None
    tests = prompt.info["tests"]
    return known_by_heart(prompt.text, function_name(gold, tests), tests)


def expression(build: Countdown) -> Answer:
    """Return a countdown expression."""

    def answer(prompt: Prompt, gold: str) -> str | None:
        if kind_of(prompt, gold) != "countdown":
            return None
        numbers = prompt.info.get("numbers", prompt.info.get("nums"))
        return build(list(numbers), int(prompt.info["target"]), gold)

    return answer


def name_alone(prompt: Prompt, gold: str) -> str | None:
    """Return a call of the right tool without arguments."""
    call = call_of(prompt)
    return tool_call(call.name, {}) if call is not None and call.arguments else None
