r"""Converts math signs, repeating decimals and powers of ten to one notation.

For example, `0.\overline{3}` becomes `\frac{3}{9}`, and `√2` becomes `\sqrt{2}`. Numerals with a
base, such as `52_8`, are compared digit by digit. The functions of this module expect short texts,
such as answers.
"""

from __future__ import annotations

import re
from types import MappingProxyType

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
