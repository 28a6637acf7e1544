"""Parses numbers as people write them: with units, currency signs, LaTeX or Markdown.

Numbers have a maximum length, so parsing is fast for any text.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from covey.rewards.math.notation import exact_decimals, powers_of_ten
from covey.rewards.math.units import CURRENCY, is_unit, names_a_value

MAX_NUMBER = 100
"""Maximum number of characters of a number with its markup, which also bounds the size of
integers."""
MAX_EXPONENT = 100

_PLAIN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_GROUPED = r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?"
_ONE = rf"(?:{_GROUPED}|{_PLAIN})"
_BODY = rf"(?:[0-9]+ [0-9]+ ?/ ?[0-9]+|{_ONE}(?: ?/ ?{_ONE})?)"
_SIMPLE = re.compile(rf"[+-]?{_PLAIN}")
_MARKED_UP = re.compile(
    r"(?:(?P<name>[A-Za-z][A-Za-z ]{0,40}?)(?: ?[=:]|\bis\b) ?)?"
    rf"(?P<sign>[+-]?) ?(?:[{CURRENCY}] ?)?(?P<inner>[+-]?)"
    rf"(?P<body>{_BODY})(?P<gap> ?)(?P<unit>[%{CURRENCY}]|[A-Za-z].{{0,60}})?"
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
    # 3½ must not become 31/2, nor x₂ become x2.
    return {"<fraction>": f" {folded} ", "<sub>": f"_{folded}", "<circle>": character}.get(
        kind, folded
    )


def normalise(text: str) -> str:
    """Normalise a text with NFKC, but keep superscripts and subscripts distinguishable.

    Each character is normalised separately. NFKC of the whole text would turn `5²` into 52, and
    would take time quadratic in the number of combining marks.

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


_INVISIBLE = re.compile(r"\\(?:left|right|displaystyle|!)(?![A-Za-z])")
_DEGREES = re.compile(
    r"(?:\^ ?\{? ?(?:\\circ|\\degree|°) ?\}?|\\degree(?![A-Za-z])|°) ?(?:[CFK](?![A-Za-z]))?"
)
# Two backslashes start a row of a matrix, so the second does not start a command.
_SPACING = re.compile(r"(?<!\\)((?:\\\\)*)\\[,;: ]|\\quad|[~ \t\r]+")
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|hbox|boxed|fbox) ?\{([^{}]*)\}"
)
_LEADING = re.compile(r"\A(?:[=:\u2248]|\\approx(?![A-Za-z])| )+")
_ANY_LATEX = re.compile(r"[\\{^°~\t\r]|  ")
"""`strip_latex` does not change a text without a match of this regex."""
_NUMERIC = r"\{ ?(-?[0-9][0-9,. ]*)\}"
_FRACTION = re.compile(rf"(?:([0-9]) ?)?\\[dtc]?frac ?(?:{_NUMERIC} ?{_NUMERIC}|([0-9]) ?([0-9]))")


def plain_fractions(text: str) -> str:
    r"""Replace LaTeX fractions of numbers in a text by `a/b`.

    >>> plain_fractions(r"1\frac{3}{4}")
    '1 3/4'
    """
    return _FRACTION.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    whole, top, bottom, digit, other = match.groups()
    return f"{whole + ' ' if whole else ''}{top or digit}/{bottom or other}"


def strip_latex(text: str) -> str:
    r"""Remove LaTeX spacing, commands such as `\text`, and degree signs from a text.

    >>> strip_latex(r"\text{about}\,90^\circ")
    ' about 90'
    """
    if not _ANY_LATEX.search(text):
        return text
    text = text.replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
    text = _SPACING.sub(r"\1 ", _INVISIBLE.sub("", text))
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    return re.sub(" +", " ", _DEGREES.sub("", text))


def strip_markup(text: str) -> str:
    r"""Remove LaTeX, Markdown and quotes that do not change the value of a short text.

    >>> strip_markup(r"**\text{Tuesday}**.")
    'Tuesday'
    """
    text = strip_latex(" ".join(text.split())).strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(opening).removesuffix(closing)
    text = text.strip(" *`'\"_").removesuffix(".").removesuffix(",")
    if text.startswith("$") and text.endswith("$"):
        text = text.strip("$")
    text = text.strip(" *`'\"_").removesuffix(".")
    return _LEADING.sub("", text)


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


def parse_number(text: str, nouns: frozenset[str] = frozenset()) -> Fraction | None:
    r"""Return the value of a text that is one number, or None for any other text.

    Units, currencies, `%` and `nouns` (see `asked_nouns`) after the number are ignored, so `50 %`
    is 50. Any other word makes the text no number. A comma groups digits by three, so `1,000` is a
    thousand. Texts such as `3,14` and `0,500` are not numbers, because a decimal comma is
    ambiguous. A list of numbers does not count as a number.

    >>> [str(parse_number(t)) for t in ("$1,000.50", r"x = \frac{3}{4}", "18 dollars.", "17, 18")]
    ['2001/2', '3/4', '18', 'None']
    """
    return None if len(text) > MAX_NUMBER else _parse_number(text, nouns)


@lru_cache(maxsize=4096)  # cached, because a group has one target and often equal final answers
def _parse_number(text: str, nouns: frozenset[str]) -> Fraction | None:
    text = normalise(text.strip())
    if _SIMPLE.fullmatch(text):
        negative, body = text[0] == "-", text.lstrip("+-")
    else:
        text = strip_markup(powers_of_ten(exact_decimals(text)))
        match = _MARKED_UP.fullmatch(plain_fractions(text))
        if match is None or (match["sign"] and match["inner"]):
            return None
        if not is_unit((match["unit"] or "").strip(), glued=not match["gap"], nouns=nouns):
            return None
        if match["name"] and not names_a_value(match["name"], nouns):
            return None
        negative, body = "-" in (match["sign"], match["inner"]), match["body"]
    value = _value(body)
    return -value if value is not None and negative else value
