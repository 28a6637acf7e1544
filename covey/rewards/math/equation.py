r"""Splits equations in an answer, finds the value that an equation states, and removes units.

For example, `x = 42` and `6 \cdot 7 = 42` both state the value 42. `41 = 42` matches no target,
because its sides have different values.
"""

from __future__ import annotations

import re

from covey.rewards.math.number import is_unit, parse_number

_COMMAND = re.compile(r"\\([A-Za-z]+)(?: ?\{[^{}]*\})?")
_TEXT = ("text", "textbf", "textit", "textrm", "mathrm", "mbox", "hbox", "operatorname")
_GREEK = re.compile(
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|"
    "tau|upsilon|phi|chi|psi|omega)",
    re.IGNORECASE,
)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()]*\))?")
_MULTIPLE = re.compile(r"(?:-|-? *[0-9./]+) *[A-Za-z]")
_OTHER_RELATION = re.compile(
    r"[<>≈;]|!=|\\(?:l|g|n)eq?(?![A-Za-z])|\\(?:neq|approx|simeq|sim|to|in|text)(?![A-Za-z])"
)
_EQUALS = re.compile(r":=|==|\\equiv(?![A-Za-z])")


def sides(formula: str) -> list[str]:
    """Split a formula into sides at its equals signs.

    Equals signs inside brackets are ignored. Lists and formulas with a relation other than `=` are
    not split.

    >>> sides("x = 6*7 = 42"), sides("x = 3, y = 4"), sides("= 42")
    (['x', '6*7', '42'], ['x = 3, y = 4'], ['42'])
    """
    if ("=" not in formula and r"\equiv" not in formula) or _OTHER_RELATION.search(formula):
        return [formula]
    text = _EQUALS.sub("=", formula)
    depth, cuts = 0, [-1]
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign == ",":
            return [formula]
        if depth == 0 and sign == "=":
            cuts.append(at)
    found = [text[a + 1 : b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [side for at, side in enumerate(found) if side or at]


def variables(formula: str) -> set[str]:
    r"""Return the variables of a formula, without the constants e, i and pi.

    >>> sorted(variables(r"2\pi r + \sin\theta")), variables(r"e^2 \text{ cm}")
    (['\\theta', 'r'], set())
    """
    greek = {
        f"\\{name}" for name in re.findall(r"\\([A-Za-z]+)", formula) if _GREEK.fullmatch(name)
    }
    bare = _COMMAND.sub(lambda m: " " if m[1] in _TEXT else m[0][len(m[1]) + 1 :], formula)
    return greek | (set(re.findall("[A-Za-z]", bare)) - {"e", "i"})


def stated_values(parts: list[str], target: str) -> list[str]:
    """Return the sides of an equation that must equal the target, or [] for an unsolved equation.

    A side that is a number, or that has the same variables as the target, must equal the target. A
    side such as `x` in `x = 42` only names the value, and is not returned. An equation such as
    `2x = 42` is unsolved.

    >>> stated_values(["x", "41", "42"], "42"), stated_values(["2x", "42"], "42")
    (['41', '42'], [])
    """
    target_variables = variables(target)
    values: list[str] = []
    rest: list[str] = []
    for part in parts:
        named = is_name(part) and part not in target_variables
        could_be = variables(part) == target_variables or parse_number(part) is not None
        (values if could_be and not named else rest).append(part)
    if any(_MULTIPLE.fullmatch(part) for part in rest):
        return []
    return values or parts[-1:]


def is_name(formula: str) -> bool:
    """Whether a formula is a name for a value, such as `x`, `x_1`, `f(x)` or `Area`."""
    return _NAME.fullmatch(formula) is not None


_UNIT_AT_END = re.compile(
    r"(?P<value>.*[0-9A-Za-z)}\]]) *"
    r"(?:\\(?:text|textrm|textit|mathrm|mbox|hbox) ?\{ *(?P<unit>[^{}]{1,40}?)\.? *\}"
    r"(?: ?\^ ?\{?-?[23]\}?)?"
    r"|(?<=[ }])(?P<bare>rad(?:ian)?s?|deg(?:ree)?s?|(?:sq(?:uare)? |cubic )?units?))\.? *\$?",
    re.DOTALL,
)


def strip_unit(formula: str) -> str:
    r"""Return a formula without the unit at its end.

    >>> strip_unit(r"\frac{\pi}{2}\text{ rad}"), strip_unit(r"x \text{ or } y")
    ('\\frac{\\pi}{2}', 'x \\text{ or } y')
    """
    match = _UNIT_AT_END.fullmatch(formula)
    if match is None or not re.search(r"[0-9\\]", match["value"]):
        return formula
    unit = match["bare"] or match["unit"].strip()
    return match["value"] if is_unit(unit, glued=False) else formula
