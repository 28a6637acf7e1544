"""Calls the scorers of reasoning_gym datasets. This module runs in the sandbox if the scorer is
impure."""

from __future__ import annotations

import ast
import importlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from covey.tasks.reasoning_gym import entry_of

# Some scorers pass an answer to Python's `eval`, or to sympy, which also evaluates text. Such a
# scorer never gets the text that a model wrote: the answer is parsed, only the kinds of syntax-tree
# nodes that are listed here are allowed, and new text is written from the tree. The parser runs in
# the sandbox too, so that an answer that crashes it does no harm.

MAX_DATA = 10_000
MAX_FORMULA = 1000
"""Maximum number of characters of a formula."""
MAX_NESTING = 10
MAX_DEPTH = 300
"""Maximum depth of a formula's syntax tree. A sum of n terms has the depth n."""
MAX_DIGITS = 30
MAX_BITS = 4096
"""Maximum size, in bits, of every intermediate number and of every exponent."""

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
     "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"}
)  # fmt: skip
CONSTANTS = frozenset({"pi"})
SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
POWERS = (*SUMS, ast.Pow)

Data = str | int | float | list["Data"]


class NotPlainError(ValueError):
    """Raised if an answer is neither plain data nor arithmetic, or exceeds a limit."""


def plain_data(text: str) -> str:
    """Parse a (nested) list of numbers and strings, and generate a safe copy of the list.

    >>> plain_data('[[0, 1],\\n [-2, "a"]]')
    "[[0, 1], [-2, 'a']]"
    """
    return repr(_data(_parsed(text, MAX_DATA), MAX_NESTING))


def plain_formula(text: str, names: Collection[str] = ()) -> str:
    """Parse a formula with functions and powers, and generate a safe copy of the formula.

    Each variable must be a single letter, or be listed in `names`.

    >>> plain_formula("x**3/3+sin( 2*x ) + C")
    'x ** 3 / 3 + sin(2 * x) + C'
    """
    return _written(text, CONSTANTS | (frozenset(names) - FUNCTIONS))


def plain_sum(text: str) -> str:
    """Parse an expression of whole numbers, `+ - * /` and parentheses, and generate a safe copy.

    >>> plain_sum("(3+4)*2")
    '(3 + 4) * 2'
    """
    return _written(text, None)


def _written(text: str, names: frozenset[str] | None) -> str:
    tree = _parsed(text, MAX_FORMULA)
    if _bits(tree, MAX_DEPTH, names) > MAX_BITS:
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


def _bits(node: ast.expr, depth: int, names: frozenset[str] | None) -> int:
    """Return an upper bound on the number of bits of an expression's value.

    `names` lists the allowed variables. If `names` is None, only whole numbers, sums, differences,
    products and quotients are allowed. Raises NotPlainError if the expression contains anything
    that is not allowed.
    """
    if depth < 0:
        raise NotPlainError("nested too deep")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _bits(node.operand, depth - 1, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, SUMS if names is None else POWERS):
        left, right = _bits(node.left, depth - 1, names), _bits(node.right, depth - 1, names)
        if isinstance(node.op, ast.Mult | ast.Div):
            return left + right
        if not isinstance(node.op, ast.Pow):
            return max(left, right) + 1
        if any(isinstance(part, ast.Name) for part in ast.walk(node.right)):
            return left + right
        return left << min(right, MAX_BITS)
    if names is not None and isinstance(node, ast.Name | ast.Call):
        return _named_bits(node, depth, names)
    number = _number(node)
    if isinstance(number, int):
        return number.bit_length() + 1
    if names is None:
        raise NotPlainError("not a whole number")
    return 2


def _named_bits(node: ast.Name | ast.Call, depth: int, names: frozenset[str]) -> int:
    if isinstance(node, ast.Name):
        if len(node.id) > 1 and node.id not in names:
            raise NotPlainError("an unknown name")
        return 1
    if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
        raise NotPlainError("an unknown function")
    most = 2 if node.func.id == "log" else 1
    if not 1 <= len(node.args) <= most:
        raise NotPlainError("arguments that it does not take")
    return sum(_bits(argument, depth - 1, names) for argument in node.args)


Entry = Mapping[str, Any]


def _as_data(answer: str, entry: Entry) -> str:
    return plain_data(answer)


def _as_sum(answer: str, entry: Entry) -> str:
    return plain_sum(answer)


def _as_formula(answer: str, entry: Entry) -> str:
    names = re.findall(r"[A-Za-z]\w*", str(entry["answer"]), re.ASCII)  # including its variables
    return plain_formula(answer, names)


EVALUATING: Mapping[str, Callable[[str, Entry], str]] = {
    "binary_matrix": _as_data,
    "n_queens": _as_data,
    "spiral_matrix": _as_data,
    "string_insertion": _as_data,
    "countdown": _as_sum,
    "puzzle24": _as_sum,
    "intermediate_integration": _as_formula,
    "polynomial_multiplication": _as_formula,
    "simple_integration": _as_formula,
}
"""Maps each dataset whose scorer evaluates answers as code to a function that makes a safe copy of
an answer."""


def load() -> None:
    """Import slow packages and fill sympy's caches, before any child process is forked."""
    importlib.import_module("reasoning_gym.composite")
    sympy = importlib.import_module("sympy")
    integral = sympy.parse_expr("x**3/3 + sin(2*x)*exp(x) + log(x) + sqrt(x) + C")
    sympy.simplify(sympy.diff(integral, sympy.Symbol("x")))


def prepare(info: Mapping[str, Any]) -> tuple[str, Any, Entry]:
    dataset, entry = entry_of(info)
    name = info["reasoning_gym"]["dataset"]
    # An entry of a composite dataset comes from one of its sub-datasets, which scores it.
    return entry["metadata"]["source_dataset"] if name == "composite" else name, dataset, entry


def score(prepared: tuple[str, Any, Entry], text: str) -> float:
    """Return the score from 0 to 1 that the dataset's own scorer gives to an answer."""
    name, dataset, entry = prepared
    try:
        answer = readable(name, text, entry)
    except NotPlainError:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scored(dataset, answer, entry)


def scored(dataset: Any, answer: str, entry: Entry) -> float:
    try:
        given = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers raise different errors for an answer in an unexpected form
        return 0.0
    return min(max(given, 0.0), 1.0) if math.isfinite(given) else 0.0


def readable(name: str, text: str, entry: Entry) -> str:
    """Return the text that the scorer gets as the answer.

    A scorer that evaluates answers as code gets new text, which is generated from the answer's
    syntax tree. Raises NotPlainError if an answer that would be evaluated is neither plain data
    (numbers, strings, lists) nor arithmetic.
    """
    if name not in EVALUATING:
        return text
    known = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    # The entry's own answers are trusted, and not all of them can be parsed.
    for answer in known:
        if isinstance(answer, str) and answer.strip() == text.strip():
            return answer
    return EVALUATING[name](text, entry)
