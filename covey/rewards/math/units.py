"""Tells what words beside a number leave its value as it is: an allow-list of units and of names.

A word that is on no list changes the value, as in `42 lakh` or `42 is wrong`. No list of such
words could be complete, so only known words are ignored.
"""

from __future__ import annotations

import re
from functools import lru_cache

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
