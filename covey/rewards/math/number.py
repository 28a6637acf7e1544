"""Parses numbers as people write them: with units, currency signs, LaTeX or Markdown.

Numbers have a maximum length, so parsing is fast for any text.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

# Tells what words beside a number leave its value as it is: an allow-list of units and of names.


CURRENCY = "$€£¥₹₩₽฿"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNITS = _words(
    """
    meter metre centimeter centimetre millimeter millimetre kilometer kilometre micrometer
    nanometer inch foot feet yard mile acre hectare liter litre milliliter millilitre gallon quart
    pint cup tablespoon teaspoon barrel bushel ounce fluid gram gramme kilogram milligram ton tonne
    pound carat square sq cubic cu
    second millisecond microsecond minute hour day night week weekday month year decade century
    centurie
    degree celsius fahrenheit kelvin centigrade radian newton joule kilojoule watt kilowatt volt
    ampere amp ohm hertz kilohertz megahertz pascal mole calorie kilocalorie byte bit kilobyte
    megabyte gigabyte horsepower knot decibel
    dollar cent euro penny pennie pence nickel dime rupee yen yuan peso franc buck
    percent percentage point unit
    people person student pupil teacher child children kid adult boy girl man men woman women
    friend guest member player worker employee customer visitor passenger animal dog puppy puppie
    cat kitten cow horse pig sheep goat chicken hen duck fish bird rabbit bee apple orange banana
    pear peach lemon grape strawberry strawberrie cherry cherrie tomato potato carrot egg cookie
    cake cupcake pie pizza sandwich muffin donut candy candie chocolate piece slice book page
    chapter card ticket stamp sticker marble ball balloon toy doll puzzle game car truck bike
    bicycle bus train boat ship plane wheel tire tree flower rose plant seed leaf leave brick block
    stick box bag bottle jar jug glass bowl plate basket bucket crate pack packet package carton
    bar roll loaf loave bunch group team class classe school house room floor seat chair table
    desk bed row column shelf shelve coin shirt dress shoe sock hat pen pencil crayon notebook
    paper photo picture painting song video movie letter word sentence message email call question
    problem answer exam test lesson lap trip step shot goal vote item object thing part section
    way solution possibility possibilitie arrangement combination permutation outcome subset
    element integer digit factor divisor triangle rectangle circle side edge face vertex vertice
    diagonal angle line path
    """
)
"""Units and counted things, in the singular or without the final `s`."""
_BESIDE = _words("of per each in total all altogether left remaining old long wide tall high deep")
_SYMBOL = re.compile(
    "[ghlmsALVW]|[cdkmn]m|[km]g|lbs?|oz|ft|in|mi|yds?|m[lL]|[kd]L|cL|cc|ha|gal|tsp|tbsp|mins?|hrs?|"
    "secs?|yrs?|wks?|ms|[ap]m|mph|kmh|kph|rpm|kWh|kW|kJ|kN|kPa|Pa|mol|cal|kcal|eV|dB|[kMG]?Hz|"
    "psi|atm|[KMGT]B|rads?|deg|pts?|USD|EUR|GBP|INR|CAD|AUD|JPY|CNY"
)
_LATER_SYMBOL = re.compile("[JKNCFTPHdw]|pp|hp|ton")
"""Symbols that are a unit only after another one, as in `m N`: `42 K` may be 42,000."""
_CHANGES_THE_VALUE = re.compile(
    "(?:hundred|thousand|million|billion|trillion|quadrillion|dozen|score|lakh|lac|crore|myriad)s?"
    "|gross|grand|couple|k|mil|mm|bn|b|pi|sqrt|root|factorial|squared|cubed|power|and|or|to|plus|"
    "minus|times|over|choose|half|halves|twice|thrice|double|triple|quarters?|thirds?|"
    "(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million|billion|trillion)ths?|"
    "mod|modulo|sin|cos|tan|log|ln|exp|inverse|reciprocal|opposite|negative|negated|base|octal|"
    "hex|hexadecimal|binary|ternary|decimal|zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    "eleven|twelve|sixteen|not|no|non|nor|never|none|neither|but|maybe|perhaps|wrong|incorrect|"
    "false|untrue|bad|is|are|was|were|be|isnt|at|least|most|less|more|fewer|than|under|above|"
    "below|ago|before|if|unless|without|except|nearly|almost|about|around|approximately",
    re.IGNORECASE,
)
_UNIT_WORD = r"[A-Za-z]+(?: ?\^\{?-?[23]\}?|[23])?"
_UNIT = re.compile(rf"{_UNIT_WORD}(?: ?[/ ] ?{_UNIT_WORD}){{0,5}}")

_NAMES = _words(
    """
    answer answers result results total sum difference product quotient remainder value number
    final area volume surface perimeter circumference length width height depth radius diameter
    distance speed velocity acceleration time age cost price profit loss revenue interest salary
    income savings discount tax tip balance amount money weight mass force energy work pressure
    temperature density probability chance expectation variance mean average median mode range
    minimum maximum min max slope intercept angle side hypotenuse root roots solution solutions
    determinant trace rank count coefficient exponent term ratio rate percentage percent limit gcd
    lcm hcf
    the a is of so thus hence therefore then my our it in for equals
    """
)
_ASKED = re.compile(r"\bhow (?:many|much) ((?:more |fewer |less )?[a-z]+(?: [a-z]+){0,3})", re.I)
_AFTER_THE_NOUN = re.compile(
    r"\b(?:do|does|did|is|are|was|were|will|would|can|could|should|must|may|has|have|had|he|she|"
    r"it|they|we|you|I|there|that|which|who|when|if|the|to|from|for|with|at|on|by|than)\b.*",
    re.I,
)


@lru_cache(maxsize=1024)
def asked_nouns(question: str, target: str = "") -> frozenset[str]:
    """Return the words that name what a question asks for (`How many ...`), or the target's unit.

    >>> sorted(asked_nouns("Ann has a dozen eggs. How many blue marbles does Bob have?"))
    ['blue', 'marbles']
    """
    asked = " ".join(_AFTER_THE_NOUN.sub("", found) for found in _ASKED.findall(question))
    words = re.findall("[a-z]{3,}", f"{asked} {target[:200] if target[:1].isdigit() else ''}", re.I)
    return frozenset(
        word.lower()
        for word in words
        if word.lower() in ("more", "fewer", "less") or not _CHANGES_THE_VALUE.fullmatch(word)
    )


def is_unit(unit: str, glued: bool, nouns: frozenset[str] = frozenset()) -> bool:
    """Whether the text after a number is a unit, or one of the `nouns` that the question asks for.

    `glued` means that no space separates the number and the unit.
    """
    if unit in ("", "%") or unit in CURRENCY:
        return True
    if not _UNIT.fullmatch(unit):
        return False
    first, *rest = words = re.findall("[A-Za-z]+", unit)
    if words[-1].lower() in ("of", "per"):
        return False
    # 18x and 18 n are terms, and 18M is 18 million.
    return (
        _SYMBOL.fullmatch(first) is not None or (not glued and _is_unit_word(first, nouns))
    ) and all(
        _SYMBOL.fullmatch(word) or _LATER_SYMBOL.fullmatch(word) or _is_unit_word(word, nouns)
        for word in rest
    )


def _is_unit_word(word: str, nouns: frozenset[str]) -> bool:
    lower = word.lower()
    singular = {lower, lower.removesuffix("s"), lower.removesuffix("es")}
    return not singular.isdisjoint(UNITS) or lower in _BESIDE or lower in nouns


def names_a_value(words: str, nouns: frozenset[str] = frozenset()) -> bool:
    """Whether words before `=` or `:` only name a value, as `x`, `AB` and `The total cost` do.

    >>> names_a_value("The total cost"), names_a_value("wrong"), names_a_value("half of the area")
    (True, False, False)
    """
    for word in re.findall("[A-Za-z]+", words):
        known = word.lower() in _NAMES or _is_unit_word(word, nouns)
        # xy and ABCD may be a product or a figure.
        letters = len(word) <= 2 or (len(word) <= 4 and word.isupper())
        if not known and (not letters or _CHANGES_THE_VALUE.fullmatch(word)):
            return False
    return True


# Converts math signs, repeating decimals and powers of ten to one notation.


_SIGNS = MappingProxyType(
    {
        "∞": r"\infty ", "∅": r"\emptyset ", "\u00d7": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
        "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "±": r"\pm ", "\u222a": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "π": r"\pi ",
    }
)  # fmt: skip
_SIGN = re.compile(f"[{''.join(_SIGNS)}]")
_ROOT = re.compile(r"([√∛∜]) *(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_DEGREE = MappingProxyType({"√": "", "∛": "[3]", "∜": "[4]"})
_VARNOTHING = re.compile(r"\\varnothing(?![A-Za-z])")


def unicode_to_latex(text: str) -> str:
    r"""Return a formula with LaTeX in place of Unicode math signs.

    >>> unicode_to_latex("2√3"), unicode_to_latex("∛(x+1)"), unicode_to_latex(r"\varnothing")
    ('2\\sqrt{3}', '\\sqrt[3]{x+1}', '\\emptyset')
    """
    text = _VARNOTHING.sub(r"\\emptyset", text)
    if text.isascii():
        return text
    text = _ROOT.sub(lambda m: rf"\sqrt{_DEGREE[m[1]]}{{{m[2] or m[3] or m[4] or ''}}}", text)
    return _SIGN.sub(lambda match: _SIGNS[match[0]], text)


_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)"
    r"(?:\\(?:overline|bar|dot) ?\{ ?([0-9]+) ?\}|\\(?:bar|dot) ?([0-9])|\(([0-9]+)\)"
    r"|([0-9])\6{2,}(?:\.\.\.|\\l?dots(?![A-Za-z])))"
)


def _repeated(match: re.Match[str]) -> str:
    whole, fixed, *cycles = match.groups()
    cycle = next(filter(None, cycles))
    top = int(f"0{whole}{fixed}{cycle}") - int(f"0{whole}{fixed}")
    return rf"\frac{{{top}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}}"


def exact_decimals(text: str) -> str:
    r"""Replace the repeating decimals in a text by fractions.

    Repeating digits are marked by a bar, a dot or brackets, or occur three times before an
    ellipsis.

    >>> exact_decimals(r"0.1\overline{6}"), exact_decimals("0.333..."), exact_decimals("3.14...")
    ('\\frac{15}{90}', '\\frac{3}{9}', '3.14...')
    """
    return _REPEATING.sub(_repeated, text) if "." in text else text


_POWER_OF_TEN = re.compile(
    r"([0-9]) *(?:\\times|\\cdot|[*\u00d7⋅·]|(?<= )x(?= )) *10 *(?:\^|\*\*) *"
    r"(?:\{ *([-+]?[0-9]{1,3}) *\}|([-+]?[0-9]{1,3})(?![0-9]))"
)


def powers_of_ten(text: str) -> str:
    r"""Rewrite products with a power of ten in `e` notation, for example `2 * 10^3` as `2e3`.

    >>> powers_of_ten(r"1.602\times 10^{-19}")
    '1.602e-19'
    """
    if "10" not in text:
        return text
    return _POWER_OF_TEN.sub(lambda m: f"{m[1]}e{m[2] or m[3]}", text)


_BASED = re.compile(r"\(?([0-9][0-9A-Za-z]*)\)?_(?:\{ ?([0-9]{1,2}|[a-z]+) ?\}|([0-9]{1,2}))")
_OTHER_BASE = re.compile(r"[0-9]\)?_|(?<![0-9A-Za-z.])0[xXbBoO][0-9A-Fa-f]")
_TEN = ("10", "ten")


def same_numeral(answer: str, target: str) -> bool | None:
    """Return whether two numerals have the same digits and base; None if neither has a base.

    If the target names a base, the answer may omit the base. `42_8` is not treated as 42, and
    `0x2a` is not treated as 0 times 2a.

    >>> same_numeral("42_8", "42"), same_numeral("52", "52_8"), same_numeral("52", "52")
    (False, True, None)
    """
    if not any(map(_OTHER_BASE.search, (answer, target))):
        return None
    (digits, base), (target_digits, target_base) = _numeral(answer), _numeral(target)
    return digits == target_digits and base in (target_base, "")


def _numeral(text: str) -> tuple[str, str]:
    """Return the digits and the base of a numeral. An empty base means ten."""
    match = _BASED.fullmatch(text.strip())
    if match is None:
        return text.strip().casefold(), ""
    base = match[2] or match[3]
    return match[1].casefold(), "" if base in _TEN else base


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
