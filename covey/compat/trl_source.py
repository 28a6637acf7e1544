"""Reads the values of arguments in a TRL script without executing the script."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.errors import ConfigError

ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LARGEST = 2**63
"""Covey does not evaluate arithmetic with operands above this number, because the result could be
huge."""
LARGEST_EXPONENT = 64
RESUME = "resume_from_checkpoint"


def parsed(text: str, name: str) -> ast.Module:
    """Parse a script; raise ConfigError if it is not valid Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(
            f"port: {name} is not valid Python: line {error.lineno}: {error.msg}"
        ) from None


def called(call: ast.Call) -> str:
    """Return the name of the class or function that is called, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]


@dataclass(slots=True)
class Values:
    """Evaluates expressions that contain only literals and names that the script binds once."""

    bound: Mapping[str, ast.expr]
    known: dict[str, Any] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """Names whose values are being computed; a name that depends on itself has no value."""

    @classmethod
    def of(cls, tree: ast.Module) -> Values:
        """Find the names to which the whole script assigns a value exactly once.

        A name that is bound once has the same value everywhere in the script. The result omits
        lists, dicts and sets that the script changes or passes to a function.
        """
        times = Counter(name for node in ast.walk(tree) for name in _binds(node))
        if "*" in times:  # an import that may bind any name
            return cls({})
        changed = {name for node in ast.walk(tree) for name in _may_change(node)}
        found = {}
        for node in ast.walk(tree):
            for target, value in assigned(node):
                if isinstance(target, ast.Name) and times[target.id] == 1:
                    found[target.id] = value
        mutable = (ast.List, ast.Dict, ast.Set, ast.Call, ast.Name)
        return cls(
            {n: v for n, v in found.items() if n not in changed or not isinstance(v, mutable)}
        )

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise ValueError if the value is unknown."""
        try:
            return self._value(node)
        except (ArithmeticError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None

    def text(self, node: ast.expr) -> str | None:
        """Return the value of an expression if it is a known string, and None otherwise."""
        try:
            return _text(self.value(node))
        except ValueError:
            return None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name():
                return self._name(node.id)
            case ast.BinOp():
                return _arithmetic(node.op, self._value(node.left), self._value(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand)
            case ast.List():
                return [self._value(item) for item in node.elts]
            case ast.Tuple():
                return tuple(self._value(item) for item in node.elts)
            case ast.Dict() if None not in node.keys:
                pairs = zip(node.keys, node.values, strict=True)
                return {self._value(k): self._value(v) for k, v in pairs if k is not None}
            case ast.Call(func=ast.Name(id="dict"), args=[]) if all(k.arg for k in node.keywords):
                return {str(k.arg): self._value(k.value) for k in node.keywords}
        return ast.literal_eval(node)

    def _name(self, name: str) -> Any:
        if name not in self.known:
            if name not in self.bound or name in self.open:
                raise ValueError(f"{name} has no known value")
            self.open.add(name)
            try:
                self.known[name] = self._value(self.bound[name])
            finally:
                self.open.discard(name)
        return self.known[name]

    def arguments(self, call: ast.Call) -> Arguments:
        """Return the keyword arguments of a call."""
        found = Arguments()
        for keyword in call.keywords:
            if keyword.arg is None:
                self._unpack(found, keyword.value)
            else:
                self.put(found, keyword.arg, keyword.value)
        return found

    def put(self, found: Arguments, name: str, value: ast.expr) -> None:
        """Add an argument, with its value if the value is known."""
        found.options.pop(name, None)
        found.unknown.pop(name, None)
        try:
            found.options[name] = self.value(value)
        except ValueError:
            found.unknown[name] = ast.unparse(value)

    def _unpack(self, found: Arguments, node: ast.expr) -> None:
        """Add the arguments that `**kw` unpacks, each with its value if the value is known."""
        name, value = f"**{ast.unparse(node)}", node
        if isinstance(node, ast.Name):
            value = self.bound.get(node.id, node)
        if isinstance(value, ast.Call) and called(value) == "dict" and not value.args:
            pairs = [(keyword.arg, keyword.value) for keyword in value.keywords]
        elif isinstance(value, ast.Dict):
            keys = [k.value if isinstance(k, ast.Constant) else None for k in value.keys]
            pairs = list(zip(map(_text, keys), value.values, strict=True))
        else:
            pairs = [(None, value)]
        for key, item in pairs:
            if key is not None:
                self.put(found, key, item)
            elif name not in found.unpacked:
                found.unpacked.append(name)


@dataclass(slots=True)
class Arguments:
    """The keyword arguments of a call."""

    options: dict[str, Any] = field(default_factory=dict)
    """The arguments whose values are known."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Maps each argument whose value is unknown to the argument's source code."""
    unpacked: list[str] = field(default_factory=list)
    """Each `**name` argument whose keys are not all known."""


def loading(tree: ast.Module, trainer: ast.Call | None) -> list[str]:
    """Return notes about dtypes in from_pretrained calls, and about a checkpoint to resume from."""
    found, names = [], {o for node in ast.walk(tree) for o in _names(node, trainer)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = [(str(keyword.arg), keyword.value) for keyword in call.keywords]
        name, func = called(call), call.func
        if name == "from_pretrained":
            found += [
                f"{name}: {key} = {ast.unparse(value)}: set model.dtype"
                for key, value in given
                if key in ("dtype", "torch_dtype")
            ]
        owner = func.value if isinstance(func, ast.Attribute) else func
        if name == "train" and (owner is trainer or ast.unparse(owner) in names):
            values = [*call.args[:1], *(value for key, value in given if key == RESUME)]
            found += [
                f"train: {RESUME} = {ast.unparse(value)}: covey.train(resume=FOLDER)"
                for value in values
            ]
    return found


def attributes(tree: ast.Module, config: ast.Call, trainer: ast.Call | None) -> Iterator[Attribute]:
    """Yield each config attribute that the script sets after it has created the config."""
    # The names under which the script stores the config, such as `trainer.args`.
    owners = {name for node in ast.walk(tree) for name in _names(node, config)}
    owners |= {f"{name}.args" for node in ast.walk(tree) for name in _names(node, trainer)}
    beside = _beside(tree, config)
    last = trainer.lineno if trainer and trainer.lineno > config.lineno else None
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in sorted(statements, key=lambda node: node.lineno):
        plain = node in beside and (last is None or node.lineno < last)
        for owner, name, value in _sets(node):
            if ast.unparse(owner) in owners:
                always = plain and not isinstance(node, ast.AugAssign)
                yield Attribute(name, value, always)


def _sets(node: ast.stmt) -> list[tuple[ast.expr, str, ast.expr]]:
    """For each attribute that a statement sets, return the object, the attribute and the value."""
    pairs = assigned(node)
    if isinstance(node, ast.AugAssign):
        pairs = [(node.target, node.value)]
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and called(call) == "setattr" and len(call.args) == 3:
        owner, name, value = call.args
        return [(owner, str(name.value if isinstance(name, ast.Constant) else "setattr"), value)]
    return [(t.value, t.attr, value) for t, value in pairs if isinstance(t, ast.Attribute)]


@dataclass(frozen=True, slots=True)
class Attribute:
    """An assignment to an attribute of a config."""

    name: str
    value: ast.expr
    plain: bool
    """Whether the assignment always runs, and runs before the trainer reads the config."""


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return a pair (target, value) for each target of an assignment."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    return []


def _names(node: ast.AST, call: ast.Call | None) -> list[str]:
    """Return the variables in which an assignment stores the result of `call`."""
    return [ast.unparse(target) for target, value in assigned(node) if value is call]


def _beside(tree: ast.Module, config: ast.Call) -> list[ast.stmt]:
    """Return the statements that follow the assignment of a config in the same block."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for index, statement in enumerate(block if isinstance(block, list) else ()):
                if any(value is config for _, value in assigned(statement)):
                    return list(block[index + 1 :]) if isinstance(block, list) else []
    return []


def _binds(node: ast.AST) -> list[str]:
    """Return the names that a syntax node binds or deletes."""
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return [node.id]
        case ast.arg():
            return [node.arg]
        case ast.alias():
            return [(node.asname or node.name).partition(".")[0]]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
            return [node.name] if node.name else []
        case ast.MatchMapping():
            return [node.rest] if node.rest else []
    return []


def _may_change(node: ast.AST) -> list[str]:
    """Return the names of objects that a statement or an expression may change."""
    found: list[ast.expr] = []
    match node:
        case ast.Attribute():
            found = [node.value]
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
            found = [node.value]
        case ast.Call() if called(node) not in ("print", "len"):
            found = node.args
        case ast.Assign() | ast.AnnAssign():
            found = [value for _, value in assigned(node)]  # a second name for the same object
    return [item.id for item in found if isinstance(item, ast.Name)]


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """Apply an arithmetic operator to two numbers, or join two strings."""
    both = (left, right)
    joined = isinstance(op, ast.Add) and all(isinstance(item, str) for item in both)
    numbers = all(isinstance(item, int | float) and abs(item) < LARGEST for item in both)
    large = isinstance(op, ast.Pow) and numbers and abs(right) > LARGEST_EXPONENT
    if type(op) not in ARITHMETIC or not (joined or numbers) or large:
        raise ValueError("not simple arithmetic")
    return ARITHMETIC[type(op)](left, right)


def _text(key: Any) -> str | None:
    return key if isinstance(key, str) else None
