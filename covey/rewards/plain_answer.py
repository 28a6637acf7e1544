"""Parses an answer and generates a safe copy, for scorers that evaluate answers as code.

Some scorers pass an answer to Python's `eval`, or to sympy, which also evaluates text. Scorers that
evaluate an answer never get the text that a model wrote. Covey parses the answer, and allows only
the types of syntax-tree nodes that this module lists. The scorer gets a text that Covey generates
from the answer's syntax tree. The parser runs in the sandbox, so that a crash on odd text does no
harm.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

MAX_DATA = 10_000
MAX_FORMULA = 1000
"""Maximum characters of an answer."""
MAX_NESTING = 10
MAX_DEPTH = 300
"""Maximum depth of a formula's syntax tree; a sum of n terms has a depth of n."""
MAX_DIGITS = 30
MAX_BITS = 4096
"""Maximum size, in bits, of every intermediate number and of every exponent."""

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
     "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"}
)  # fmt: skip
CONSTANTS = frozenset({"pi"})
SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)

Data = str | int | float | list["Data"]


class NotPlainError(ValueError):
    """Raised if the text is neither plain data nor arithmetic, or if it exceeds a limit."""


def plain_data(text: str) -> str:
    """Parse a (nested) list of numbers and strings, and return it as newly generated text.

    >>> plain_data('[[0, 1],\\n [-2, "a"]]')
    "[[0, 1], [-2, 'a']]"
    """
    return repr(_data(_parsed(text, MAX_DATA), MAX_NESTING))


def plain_formula(text: str, names: Collection[str] = ()) -> str:
    """Parse arithmetic with functions and powers, and return it as newly generated text.

    Each variable must be a single letter, or be listed in `names`.

    >>> plain_formula("x**3/3+sin( 2*x ) + C")
    'x ** 3 / 3 + sin(2 * x) + C'
    """
    return _written(text, _Formula(names))


def plain_sum(text: str) -> str:
    """Parse an expression of whole numbers, + - * / and parentheses, and return it as new text.

    >>> plain_sum("(3+4)*2")
    '(3 + 4) * 2'
    """
    return _written(text, _Sum())


def _written(text: str, rules: _Sum) -> str:
    tree = _parsed(text, MAX_FORMULA)
    if rules.bits(tree, MAX_DEPTH) > MAX_BITS:
        raise NotPlainError("a number too large")
    return ast.unparse(tree)


def _parsed(text: str, most: int) -> ast.expr:
    text = text.strip()
    if len(text) > most or not text.isascii() or "\0" in text:
        raise NotPlainError("too long, or not ASCII")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NotPlainError("no expression") from None


def _data(node: ast.expr, depth: int) -> Data:
    if depth < 0:
        raise NotPlainError("nested too deep")
    if isinstance(node, ast.List | ast.Tuple):
        return [_data(item, depth - 1) for item in node.elts]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    return _number(node)


def _number(node: ast.expr) -> int | float:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        raise NotPlainError("no number")
    number: int | float = node.value  # type: ignore[assignment]
    if not abs(number) < 10**MAX_DIGITS:
        raise NotPlainError("a number too large")
    return number


class _Sum:
    """Checks an expression's syntax tree, and bounds the size of the expression's value."""

    operators: tuple[type[ast.operator], ...] = SUMS

    def bits(self, node: ast.expr, depth: int) -> int:
        """Return an upper bound on the number of bits of an expression's value.

        Raises NotPlainError for a node that is not allowed.
        """
        if depth < 0:
            raise NotPlainError("nested too deep")
        if isinstance(node, ast.BinOp) and isinstance(node.op, self.operators):
            left, right = self.bits(node.left, depth - 1), self.bits(node.right, depth - 1)
            grows = isinstance(node.op, ast.Mult | ast.Div)
            return left + right if grows else max(left, right) + 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            return self.bits(node.operand, depth - 1)
        return self.atom(node, depth)

    def atom(self, node: ast.expr, depth: int) -> int:
        number = _number(node)
        if not isinstance(number, int):
            raise NotPlainError("not a whole number")
        return number.bit_length() + 1


class _Formula(_Sum):
    def __init__(self, names: Collection[str]) -> None:
        self.names = CONSTANTS | (frozenset(names) - FUNCTIONS)

    def bits(self, node: ast.expr, depth: int) -> int:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, exponent = self.bits(node.left, depth - 1), self.bits(node.right, depth - 1)
            if any(isinstance(part, ast.Name) for part in ast.walk(node.right)):
                return base + exponent
            return base << min(exponent, MAX_BITS)
        return super().bits(node, depth)

    def atom(self, node: ast.expr, depth: int) -> int:
        if isinstance(node, ast.Name):
            if len(node.id) > 1 and node.id not in self.names:
                raise NotPlainError("an unknown name")
            return 1
        if isinstance(node, ast.Call):
            return self.call(node, depth)
        return 2 if isinstance(_number(node), float) else int(_number(node)).bit_length() + 1

    def call(self, node: ast.Call, depth: int) -> int:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
            raise NotPlainError("an unknown function")
        most = 2 if node.func.id == "log" else 1
        if not 1 <= len(node.args) <= most:
            raise NotPlainError("arguments that it does not take")
        return sum(self.bits(argument, depth - 1) for argument in node.args)
