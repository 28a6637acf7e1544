"""Finding the final answer in a text, and reading numbers in their usual dress.

Where no mark shows the answer it is looked for in the last characters only, and numbers have a
greatest length, so that nothing here takes long, whatever the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

from covey.errors import ConfigError, nearest
from covey.rewards.expression import ExpressionError, evaluate
from covey.rewards.notation import exact_decimals, powers_of_ten
from covey.rewards.text import after_thinking, differ, inside
from covey.rewards.tool_call import parse_call

MAX_NUMBER = 100
"""Characters of a number, dress included: no huge integers arise."""
MAX_EXPONENT = 100
MAX_BOXED = 10_000
TAIL = 2000
"""How far from the end a number that nothing marks as the answer may stand."""

_CURRENCY = "$€£¥₹₩₽฿"
_PLAIN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_GROUPED = r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?"
_ONE = rf"(?:{_GROUPED}|{_PLAIN})"
_BODY = rf"(?:[0-9]+ [0-9]+ ?/ ?[0-9]+|{_ONE}(?: ?/ ?{_ONE})?)"
_SIMPLE = re.compile(rf"[+-]?{_PLAIN}")
_DRESSED = re.compile(
    r"(?:[A-Za-z][A-Za-z ]{0,40}?(?: ?[=:]|\bis\b) ?)?"
    rf"(?P<sign>[+-]?) ?(?:[{_CURRENCY}] ?)?(?P<inner>[+-]?)"
    rf"(?P<body>{_BODY})(?P<gap> ?)(?P<unit>[%{_CURRENCY}]|[A-Za-z].{{0,60}})?"
)
_UNIT_WORD = r"[A-Za-z]+(?: ?\^\{?-?[23]\}?|[23])?"
_UNIT = re.compile(rf"{_UNIT_WORD}(?: ?[/ ] ?{_UNIT_WORD}){{0,5}}")
_SYMBOL = re.compile(
    "[ghlmsALVW]|[cdkmn]m|[km]g|lbs?|oz|ft|in|mi|yd|m[lL]|kL|min|hrs?|[ap]m|mph|kmh|kWh|k?Hz|"
    "USD|EUR|GBP"
)
_CHANGES_THE_VALUE = re.compile(
    "(?:hundred|thousand|million|billion|trillion|dozen|score)s?|k|bn|b|pi|sqrt|root|factorial|"
    "squared|cubed|and|or|to|plus|minus|times|over|choose|half|halves|thirds?|quarters?|mod|sin|"
    "cos|tan|log|ln|exp|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?|"
    "not|but|maybe|perhaps",
    re.IGNORECASE,
)

_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_DASHES = "\u2010\u2011\u2012\u2013\u2212"


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    if character in _DASHES:
        return "-"
    kind = unicodedata.decomposition(character).partition(" ")[0]
    folded = unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    # 3½ is not 31/2, and x₂ not x2.
    return {"<fraction>": f" {folded} ", "<sub>": f"_{folded}", "<circle>": character}.get(
        kind, folded
    )


def normalise(text: str) -> str:
    """Return the text in plain characters: NFKC, but that the rank of digits is kept.

    It goes one character at a time: the reordering of combining marks in NFKC proper takes time
    quadratic in their number, and joins `5²` to 52.

    >>> normalise("x² = ½")
    'x^{2} =  1/2 '
    """
    if text.isascii():
        return text
    text = _SUPERSCRIPTS.sub(
        lambda match: "^{" + unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-") + "}",
        text,
    )
    return _NOT_ASCII.sub(lambda match: _plain_character(match[0]), text)


_WORDLESS = re.compile(r"\\(?:left|right|displaystyle|!)(?![A-Za-z])")
_DEGREES = re.compile(
    r"(?:\^ ?\{? ?(?:\\circ|\\degree|°) ?\}?|\\degree(?![A-Za-z])|°) ?(?:[CFK](?![A-Za-z]))?"
)
# Two backslashes begin a row of a matrix, whatever follows them.
_SPACING = re.compile(r"(?<!\\)((?:\\\\)*)\\[,;: ]|\\quad|[~ \t\r]+")
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|hbox|boxed|fbox) ?\{([^{}]*)\}"
)
_LEADING = re.compile(r"\A(?:[=:\u2248]|\\approx(?![A-Za-z])| )+")
_ANY_LATEX = re.compile(r"[\\{^°~\t\r]|  ")
"""Whatever these look for has one of this in it, which plain answers have not."""
_NUMERIC = r"\{ ?(-?[0-9][0-9,. ]*)\}"
_FRACTION = re.compile(rf"(?:([0-9]) ?)?\\[dtc]?frac ?(?:{_NUMERIC} ?{_NUMERIC}|([0-9]) ?([0-9]))")


def _fraction(match: re.Match[str]) -> str:
    whole, top, bottom, digit, other = match.groups()
    return f"{whole + ' ' if whole else ''}{top or digit}/{bottom or other}"


def _without_latex(text: str) -> str:
    if not _ANY_LATEX.search(text):
        return text
    text = text.replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
    text = _SPACING.sub(r"\1 ", _WORDLESS.sub("", text))
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    return re.sub(" +", " ", _DEGREES.sub("", text))


def without_dress(text: str) -> str:
    r"""Return a short text without the LaTeX, Markdown and quotes that change no value.

    >>> without_dress(r"**\text{Tuesday}**.")
    'Tuesday'
    """
    text = _without_latex(" ".join(text.split())).strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(opening).removesuffix(closing)
    text = text.strip(" *`'\"_").removesuffix(".").removesuffix(",")
    if text.startswith("$") and text.endswith("$"):
        text = text.strip("$")
    text = text.strip(" *`'\"_").removesuffix(".")
    return _LEADING.sub("", text)


def is_unit(unit: str, glued: bool) -> bool:
    """Tell whether a word behind a number, without a blank if `glued`, leaves its value alone."""
    if unit in ("", "%") or unit in _CURRENCY:
        return True
    if not _UNIT.fullmatch(unit):
        return False
    words = re.findall("[A-Za-z]+", unit)
    if any(_CHANGES_THE_VALUE.fullmatch(word) for word in words):
        return False
    # 18x and 18 n are terms, and 18M is a lot more than 18.
    return _SYMBOL.fullmatch(words[0]) is not None or (len(words[0]) > 1 and not glued)


def _value(body: str) -> Fraction | None:
    whole, space, rest = body.partition(" ")
    if space and "/" in rest and not re.match(r"/|[0-9]{3}(?![0-9/])", rest):
        part = _value(rest)
        return None if part is None or part >= 1 else int(whole) + part
    top, slash, bottom = body.replace(",", "").replace(" ", "").partition("/")
    for number in (top, bottom):
        _, _, exponent = number.lower().partition("e")
        if exponent and abs(int(exponent)) > MAX_EXPONENT:
            return None
    if not slash:
        return Fraction(top)
    divisor = Fraction(bottom)
    return Fraction(top) / divisor if divisor else None


def read_number(text: str) -> Fraction | None:
    r"""Return the number that the whole text is, whatever it wears, or None.

    Units, currencies and `%` are dress: `50 %` is 50. A comma groups digits by three, so `1,000` is
    a thousand while `3,14` and `0,500` are no numbers here: as decimal commas they would mean one
    thing in one country and another in the next. A list is not a number.

    >>> [str(read_number(t)) for t in ("$1,000.50", r"x = \frac{3}{4}", "18 dollars.", "17, 18")]
    ['2001/2', '3/4', '18', 'None']
    """
    return None if len(text) > MAX_NUMBER else _read_number(text)


@lru_cache(maxsize=4096)  # the answers of a group are much alike, and what is expected is the same
def _read_number(text: str) -> Fraction | None:
    text = normalise(text.strip())
    if _SIMPLE.fullmatch(text):
        negative, body = text[0] == "-", text.lstrip("+-")
    else:
        text = without_dress(powers_of_ten(exact_decimals(text)))
        match = _DRESSED.fullmatch(_FRACTION.sub(_fraction, text))
        if match is None or (match["sign"] and match["inner"]):
            return None
        if not is_unit((match["unit"] or "").strip(), glued=not match["gap"]):
            return None
        negative, body = "-" in (match["sign"], match["inner"]), match["body"]
    value = _value(body)
    return -value if value is not None and negative else value


_NUMERAL = re.compile(
    r"(?<![0-9])[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?(?![0-9/]|[.,:][0-9])"
    r"|[0-9]+ [0-9]+/[0-9]+|\.?[0-9]+(?:[.,/:][0-9]+)*(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
)
_PART_OF_A_NAME = re.compile(r"(?:[A-Za-z_]|_\{|[A-Za-z][\^_]\{?[+-]?)$")
_OPERAND = re.compile(
    "[0-9)\\]}%] *(?:\\*\\*|[-+*/^\u00d7\u22c5\u00b7\u00f7]|\\\\times|\\\\cdot) *[({]*[-+]?$"
    "|(?:\\\\[A-Za-z]+\\{?|[A-Za-z]\\(|\u221a[({]?)[-+]?$"
)
_SIGN = re.compile(rf"(?P<before>.?)(?P<sign>[+-])[{_CURRENCY}]?$", re.DOTALL)
_MAGNITUDE = re.compile(" (?:hundred|thousand|million|billion|trillion|dozen|pi)", re.IGNORECASE)
_HEADING = re.compile(r"[*_]*[A-Za-z]{2}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BASE = re.compile(r"_\{? ?[0-9a-z]")
_SUFFIX = re.compile(r"[A-Za-z]+| [A-Za-z]+")


def last_number(text: str) -> str | None:
    """Return the last number in a text, as written, without currency and unit, or None.

    Digits that belong to a name or to a unit (`CO2`, `cm^2`) or to an ordinal are passed over. An
    operand is no answer: `5**2` and `sqrt(2)` end in no number.

    >>> last_number("So 5 + 3 = 8 cm^2, or $1,008."), last_number("that is 5**2")
    ('1,008', None)
    """
    tail = powers_of_ten(_without_latex(normalise(text[-TAIL:])))
    tail = _FRACTION.sub(_fraction, tail)
    for match in reversed(list(_NUMERAL.finditer(tail))):
        if match.start() == 0 and len(text) > TAIL:
            return None
        before, after = tail[max(0, match.start() - 12) : match.start()], tail[match.end() :]
        suffix = _SUFFIX.match(after)
        word = suffix[0] if suffix else ""
        if _OPERAND.search(before) or _BASE.match(after):
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
    return None if read_number(numeral + (word if changes_it else "")) is None else numeral


def _last_boxed(text: str) -> str | None:
    """Return what the last `\\boxed{...}` or `\\fbox{...}` holds, if its braces are balanced."""
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
    answers = inside(rest, "answer")
    if not answers or differ(answers):
        return None
    boxed = _last_boxed(answers[-1])
    return answers[-1] if boxed is None else boxed


def _after_hashes(rest: str) -> str | None:
    line = rest.rpartition("####")[2] if "####" in rest else ""
    line = line.lstrip().partition("\n")[0]
    # In Markdown the same mark begins a heading.
    return None if _HEADING.match(line) and read_number(line) is None else line


def _calculated(rest: str) -> str | None:
    """Return the value of the calculator call that the text is. The model need not compute it."""
    call = parse_call(rest)
    if call is None or call.name not in ("calculator", "calculate", "calc"):
        return None
    arguments = [*call.positional, *call.arguments.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], str):
        return None
    try:
        return str(evaluate(arguments[0], "+-*/**"))
    except ExpressionError:
        return None


def _unmarked(rest: str) -> str | None:
    _, _, rest = rest.rpartition("</tool_call>")
    # The numbers of a call are what is asked for, not what is answered.
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
"""How an answer may be marked, in the order in which it is looked for."""


def check_styles(styles: Sequence[str]) -> None:
    """Raise a `ConfigError` unless these are styles, and at least one."""
    for style in styles:
        if style not in _READERS:
            raise ConfigError(f"reward: {style!r} is no style of answer{nearest(style, STYLES)}")
    if not styles:
        raise ConfigError(f"reward: styles is empty; choose from {', '.join(STYLES)}")


def find_answer(text: str, styles: Sequence[str] = STYLES) -> str | None:
    r"""Return the final answer by the first of the styles that finds one, or None.

    `answer`: what stands in `<answer>...</answer>`, and once such a tag is there, however broken,
    nothing else counts; `boxed`: the last `\boxed{...}`; `hashes`: the line
    after the last `####`; `call`: the value of the calculator call that the text is; `number`: the
    last number. What stands in the thinking never counts, and an empty answer is none.

    >>> find_answer("<think>7 or 8?</think>It is 8."), find_answer("<think>It is 8.")
    ('8', None)
    >>> find_answer("<tool_call>calculator(expression='3.14159 * 5**2')</tool_call>")
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


def final_text(text: str) -> str:
    """Return the `<answer>` after the thinking, or all that follows it where there is none.

    Different answers are none.

    >>> final_text("<think>Hm.</think> So: <answer> Paris </answer>"), final_text("Paris\\n")
    ('Paris', 'Paris')
    """
    rest = after_thinking(text)
    answers = inside(rest, "answer")
    if differ(answers):
        return ""
    return (answers[-1] if answers else rest).strip()
