"""Inserts small errors into Python programs, such as `<` in place of `<=`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from random import Random

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult,
}  # fmt: skip
_CALLED = {
    "min": "max", "max": "min", "sum": "max", "any": "all", "all": "any", "sorted": "list",
    "reversed": "list", "abs": "int", "list": "set",
}  # fmt: skip
_JOINED: dict[type[ast.boolop], type[ast.boolop]] = {ast.And: ast.Or, ast.Or: ast.And}


def mutants(program: str, random: Random) -> Iterator[str]:
    """Yield versions of a program with one small error each, in random order.

    This function raises SyntaxError if the program is not valid Python.
    """
    tree = ast.parse(program)
    places = [place for place, node in enumerate(ast.walk(tree)) if _mutate(copy.deepcopy(node))]
    random.shuffle(places)
    for place in places:
        changed = copy.deepcopy(tree)
        _mutate(list(ast.walk(changed))[place])
        yield ast.unparse(changed) + "\n"


def _mutate(node: ast.AST) -> bool:
    """Put an error into a syntax node; return whether this was possible."""
    if isinstance(node, ast.Constant):
        return _mutate_constant(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        node.ops[0] = _COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _COMPUTED:
        node.op = _COMPUTED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = _JOINED[type(node.op)]()
    elif isinstance(node, ast.Name) and node.id in _CALLED:
        node.id = _CALLED[node.id]
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        node.args[:2] = node.args[1::-1]
    elif isinstance(node, ast.comprehension) and node.ifs:
        node.ifs.clear()
    else:
        return False
    return True


def _mutate_constant(node: ast.Constant) -> bool:
    if isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node.value, int):
        node.value += 1
    elif isinstance(node.value, str) and node.value:
        node.value = node.value[:-1]
    else:
        return False
    return True
