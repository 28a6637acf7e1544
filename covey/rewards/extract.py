"""Extraction of the final answer from a completion.

An unmarked answer is searched for only at the end of the text, so extraction is fast even for long
texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from covey.errors import ConfigError, nearest
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate
from covey.rewards.math.number import (
    CURRENCY,
    normalise,
    parse_number,
    plain_fractions,
    powers_of_ten,
    strip_latex,
)
from covey.rewards.text import after_thinking, answers_differ, tag_contents
from covey.rewards.tool_call import parse_call

MAX_BOXED = 10_000
TAIL = 2000
"""An unmarked number counts as the answer only within the last TAIL characters of a text."""

_NUMERAL = re.compile(
    r"(?<![0-9])[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?(?![0-9/]|[.,:][0-9])"
    r"|[0-9]+ [0-9]+/[0-9]+|\.?[0-9]+(?:[.,/:][0-9]+)*(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
)
_PART_OF_A_NAME = re.compile(r"(?:[A-Za-z_]|_\{|[A-Za-z][\^_]\{?[+-]?)$")
_OPERAND = re.compile(
    "[0-9)\\]}%] *(?:\\*\\*|[-+*/^\u00d7\u22c5\u00b7\u00f7]|\\\\times|\\\\cdot) *[({]*[-+]?$"
    "|(?:\\\\[A-Za-z]+\\{?|[A-Za-z]\\(|\u221a[({]?)[-+]?$"
)
_SIGN = re.compile(rf"(?P<before>.?)(?P<sign>[+-])[{CURRENCY}]?$", re.DOTALL)
_MAGNITUDE = re.compile(
    " (?:hundred|thousand|million|billion|trillion|dozen|lakh|lac|crore|gross|pi)", re.IGNORECASE
)
_DENIED = re.compile(
    r" (?:is|was|are|were) (?:not|wrong|incorrect|false)(?![a-z])| (?:at (?:least|most)|or (?:more"
    r"|less|fewer)|in base|base)(?![a-z])| (?:is|was)n['\u2019]t(?![a-z])",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(r"(?<![a-z])(?:not|wrong|incorrect|n['\u2019]t)[ :=]{1,3}[$+-]?$", re.I)
_HEADING = re.compile(r"[*_]*[A-Za-z]{2}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BASE = re.compile(r"_\{? ?[0-9a-z]")
_SUFFIX = re.compile(r"[A-Za-z]+| [A-Za-z]+")


def last_number(text: str) -> str | None:
    """Return the last number in a text as it is written, without currency and unit.

    Return None if the text has no number that can be an answer. Digits in names (`CO2`), units
    (`cm^2`) and ordinals are skipped. A number inside an expression is not an answer, so `5**2` and
    `sqrt(2)` return None.

    >>> last_number("So 5 + 3 = 8 cm^2, or $1,008."), last_number("that is 5**2")
    ('1,008', None)
    """
    tail = plain_fractions(powers_of_ten(strip_latex(normalise(text[-TAIL:]))))
    for match in reversed(list(_NUMERAL.finditer(tail))):
        if match.start() == 0 and len(text) > TAIL:
            return None
        before, after = tail[max(0, match.start() - 12) : match.start()], tail[match.end() :]
        suffix = _SUFFIX.match(after)
        word = suffix[0] if suffix else ""
        if _OPERAND.search(before) or _BASE.match(after):
            return None
        if _DENIED.match(after) or _DENIED_BEFORE.search(before):
            return None
        if _PART_OF_A_NAME.search(before) or word in ("st", "nd", "rd", "th"):
            continue
        return _standing_alone(before, match[0], word)
    return None


def _standing_alone(before: str, numeral: str, word: str) -> str | None:
    sign = _SIGN.search(before)
    if sign:
        if sign["before"].isalnum():
            return None
        numeral = sign["sign"] + numeral
    changes_it = word[:1] != " " or _MAGNITUDE.fullmatch(word)
    return None if parse_number(numeral + (word if changes_it else "")) is None else numeral


def ends_in(text: str, target: str) -> bool:
    """Whether the last number of a text equals the target."""
    found, number = last_number(text), parse_number(target)
    return found is not None and number is not None and parse_number(found) == number


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` if its braces balance."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for match in _BRACE.finditer(text, start, start + MAX_BOXED):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def _tagged(rest: str) -> str | None:
    answers = tag_contents(rest, "answer")
    if not answers or answers_differ(answers):
        return None
    boxed = _last_boxed(answers[-1])
    return answers[-1] if boxed is None else boxed


def _after_hashes(rest: str) -> str | None:
    line = rest.rpartition("####")[2] if "####" in rest else ""
    line = line.lstrip().partition("\n")[0]
    # In Markdown `####` starts a heading.
    return None if _HEADING.match(line) and parse_number(line) is None else line


def _calculated(rest: str) -> str | None:
    call = parse_call(rest)
    if call is None or call.name not in ("calculator", "calculate", "calc"):
        return None
    arguments = [*call.positional, *call.arguments.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], str):
        return None
    try:
        return str(evaluate(arguments[0], powers=True))
    except ExpressionError:
        return None


def _unmarked(rest: str) -> str | None:
    _, _, rest = rest.rpartition("</tool_call>")
    # The numbers in a call are arguments, not a final answer.
    return None if parse_call(rest) is not None else last_number(rest)


_READERS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "answer": _tagged,
        "boxed": _last_boxed,
        "hashes": _after_hashes,
        "call": _calculated,
        "number": _unmarked,
    }
)
STYLES = tuple(_READERS)
"""The styles in which a completion may give its final answer, in the order of the search."""


def check_styles(styles: Sequence[str]) -> None:
    """Raise ConfigError if an answer style is unknown, or if no answer style is given."""
    for style in styles:
        if style not in _READERS:
            hint = nearest(style, STYLES)
            raise ConfigError(f"reward: {style!r} is not a known answer style{hint}")
    if not styles:
        raise ConfigError(f"reward: the option `styles` is empty; choose from {', '.join(STYLES)}")


def extract_answer(text: str, styles: Sequence[str] = STYLES) -> str | None:
    r"""Return the final answer that the first matching style finds, or None if no style matches.

    | style | final answer |
    |---|---|
    | answer | the content of `<answer>...</answer>`; if this tag occurs, no other style counts |
    | boxed | the last `\boxed{...}` |
    | hashes | the line after the last `####` |
    | call | the value of a calculator call that is the whole text |
    | number | the last number |

    Answers inside the thinking and empty answers are ignored.

    >>> extract_answer("<think>7 or 8?</think>It is 8."), extract_answer("<think>It is 8.")
    ('8', None)
    >>> extract_answer("<tool_call>calculator(expression='3.14159 * 5**2')</tool_call>")
    '314159/4000'
    """
    rest = after_thinking(text)
    if "answer" in styles and "<answer" in rest:
        styles = ("answer",)
    for style in styles:
        answer = _READERS[style](rest)
        if answer is not None and answer.strip():
            return answer.strip()
    return None


def extract_text(text: str) -> str:
    """Return the text after the thinking, or only the content of `<answer>` if this tag occurs.

    If a completion gives several different answers, return an empty string.

    >>> extract_text("<think>Hm.</think> So: <answer> Paris </answer>"), extract_text("Paris\\n")
    ('Paris', 'Paris')
    """
    rest = after_thinking(text)
    answers = tag_contents(rest, "answer")
    if answers_differ(answers):
        return ""
    return (answers[-1] if answers else rest).strip()
