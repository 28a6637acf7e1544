"""The identity of a reward: name, version and source hash, recorded with every rollout."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import linecache
import marshal
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

# The source code that a user's function or class depends on, within its own file.


_PLAIN = (str, bytes, int, float, bool, type(None))
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_COMPOUND = (ast.If, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.For, ast.AsyncFor,
             ast.While, ast.Match)  # fmt: skip


def source_hash(thing: Any) -> str:
    """Return the hash of the source of a function or class.

    Without source text, for example for code that was passed to `eval`, the hash is that of the
    bytecode.
    """
    text = "\n".join(sorted(_sources(thing, {}).values()))
    return hashlib.sha256(text.encode()).hexdigest()


def names_in_source(thing: Any) -> set[str]:
    """Return all names to which the source of a function or class refers."""
    trees = [ast.parse(text) for text in _sources(thing, {}, unparse=True).values()]
    return {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _sources(thing: Any, found: dict[Any, str], *, unparse: bool = False) -> dict[Any, str]:
    """Add the source of a function or class to `found`, which maps places to normalized code."""
    thing = inspect.unwrap(thing)
    tree, scopes = _definition(thing)
    if tree is None:
        code = getattr(thing, "__code__", None)
        key = marshal.dumps(code).hex() if code else f"{thing.__module__}:{thing.__qualname__}"
        found[key] = "" if unparse else key
        return found
    file = _file(thing)
    around = getattr(thing, "__globals__", None) or vars(inspect.getmodule(thing) or object)
    waiting: list[ast.AST] = [*scopes.pop(0)]
    while waiting:
        node = waiting.pop()
        place = (file, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if place in found:
            continue
        found[place] = ast.unparse(node) if unparse else ast.dump(_without_docstrings(node))
        for name in sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}):
            bound = next((b for body in scopes if (b := list(_binding(body, name)))), None)
            waiting += bound or []
            other = around.get(name)
            # The cells of a notebook are files of their own.
            if bound is None and (inspect.isfunction(other) or inspect.isclass(other)):
                if other.__module__ == thing.__module__ and _file(other) != file:
                    _sources(other, found, unparse=unparse)
            elif bound is None and isinstance(other, _PLAIN) and name in around:
                found[name] = f"{name} = {other!r}"
    for name, value in _enclosed(thing).items():
        found[name, "enclosed"] = f"{name} = {value!r}"
    return found


def _enclosed(function: Any) -> Mapping[str, Any]:
    """Return the plain values that a function has taken from the function around it."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True) \
        if inspect.isfunction(function) else ()  # fmt: skip
    values = {}
    for name, cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # not yet bound
            continue
        if isinstance(value, _PLAIN):
            values[name] = value
    return values


def _file(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    if code is not None:
        return str(code.co_filename)
    try:
        return inspect.getfile(thing)
    except (OSError, TypeError):
        return ""


def _definition(thing: Any) -> tuple[ast.Module | None, list[Sequence[ast.AST]]]:
    """Find a function or class in its file.

    Return the file's syntax tree, and scopes: the definition itself, and then the bodies around it
    from the innermost to that of the module. The tree is None if the definition has no text.
    """
    file = _file(thing)
    linecache.checkcache(file)
    lines = linecache.getlines(file, getattr(thing, "__globals__", None))
    tree = _parsed("".join(lines)) if lines else None
    if tree is None:
        return None, []
    wanted = thing.__qualname__.replace(".<locals>", "").split(".")
    found = [d for d in _definitions(tree.body, [], [tree.body]) if d[0] == wanted]
    if code := getattr(thing, "__code__", None):
        # Definitions may share a name, and lambdas do; an edited file has other line numbers.
        at_line = [d for d in found if code.co_firstlineno in _first_lines(d[1])]
        found = at_line or (found if wanted[-1] != "<lambda>" else [])
    if not found:
        return None, []
    nodes = [node for _, node, _ in found]
    return tree, [nodes if wanted[-1] == "<lambda>" else nodes[-1:], *found[-1][2]]


def _first_lines(node: Any) -> set[int]:
    return {node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))}


@lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _definitions(
    nodes: Sequence[ast.AST], path: list[str], bodies: list[Sequence[ast.AST]]
) -> Iterator[tuple[list[str], Any, list[Sequence[ast.AST]]]]:
    """Yield each function and class with its qualified name and with the bodies around it."""
    for node in nodes:
        inner_path, inner = path, bodies
        if isinstance(node, _Function):
            inner_path = [*path, getattr(node, "name", "<lambda>")]
            yield inner_path, node, bodies
            if not isinstance(node, ast.Lambda | ast.ClassDef):
                inner = [node.body, *bodies]
        yield from _definitions(list(ast.iter_child_nodes(node)), inner_path, inner)


def _binding(body: Sequence[ast.AST], name: str) -> Iterator[ast.AST]:
    """Yield the statements of a body that give a value to a name, without inner functions."""
    for node in body:
        if not isinstance(node, _COMPOUND):
            if name in _bound(node):
                yield node
            continue
        parts = list(ast.iter_child_nodes(node))
        heads = [part for part in parts if isinstance(part, ast.expr | ast.withitem)]
        if any(name in _stored(head) for head in heads):  # of a loop or of `with`
            yield from heads
        yield from _binding([part for part in parts if isinstance(part, ast.stmt)], name)
        for part in parts:
            if isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _binding(part.body, name)


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a simple statement or a definition binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return _stored(node)


def _stored(node: ast.AST) -> set[str]:
    """Return the names to which a node assigns, also to a part: `a.b = 1` and `a[0] = 1`."""
    found = set()
    for target in ast.walk(node):
        if isinstance(getattr(target, "ctx", None), ast.Store):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name):
                found.add(target.id)
    return found


def _without_docstrings(node: ast.AST) -> ast.AST:
    """Return a copy of a syntax node without the docstrings of its functions and classes."""
    copy = ast.parse(ast.unparse(node)) if isinstance(node, ast.stmt | ast.expr) else node
    for inner in ast.walk(copy):
        body = getattr(inner, "body", None)
        documented = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[:] = body[1:] or [ast.Pass()]
    return copy


_AS_IT_IS = str | bytes | int | float | bool | None


def identity(name: str, reward: Any) -> str:
    """Return the identity of a reward, for example `math@1#9f2c51d0a3b4`.

    The hash covers the reward's options and its source code. For a built-in reward, the source code
    consists of the packages `covey.rewards`, `covey.recipes` and `covey.sandbox`. For a user's
    reward, the source code is the function or class with all that it refers to in its file
    (`source_hash`). Comments, formatting and other code of the file do not count. Rewards with the
    same identity give the same score to the same completion, except if a module that the file
    imports has changed.

    >>> from covey.rewards.think_answer import ThinkAnswer
    >>> identity("think_answer", ThinkAnswer()).startswith("think_answer@1#")
    True
    """
    sources: set[str] = set()
    description = _describe(reward, sources)
    digest = hashlib.sha256("".join([*sorted(sources), description]).encode())
    return f"{name}@{reward.version}#{digest.hexdigest()[:12]}"


def _state(value: Any) -> Mapping[str, Any] | None:
    """Return the state that pickle would save for a reward or callable, or None for other
    objects."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    if inspect.ismethod(value):
        return {"function": value.__func__, "self": value.__self__}
    if callable(value) and not inspect.isroutine(value):
        state = value.__getstate__()
        return state if isinstance(state, Mapping) else {"state": state}
    return None


def _describe(value: Any, sources: set[str], parents: tuple[int, ...] = ()) -> str:
    """Return a text that describes a value and everything that the value contains.

    The set `sources` receives the hash of the source of each class and function in the value. A
    function is described by its name, not by its memory address.
    """
    if isinstance(value, _AS_IT_IS):
        return repr(value)
    if id(value) in parents:  # a cycle
        return _kind(value)

    def inner(value_inside: Any) -> str:
        return _describe(value_inside, sources, (*parents, id(value)))

    state = _state(value)
    if state is None and isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {inner(v)}" for k, v in value.items()) + "}"
    if state is None and isinstance(value, list | tuple):
        return "[" + ", ".join(map(inner, value)) + "]"
    if state is None and isinstance(value, set | frozenset):  # its order differs between processes
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    thing = value if inspect.isroutine(value) else type(value)
    own = str(thing.__module__).startswith("covey.")
    sources.add(_own_source() if own else source_hash(thing))
    if state is not None:
        return f"{type(value).__qualname__}({inner(state)})"
    return f"{value.__module__}:{value.__qualname__}" if inspect.isroutine(value) else _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


@cache
def _own_source() -> str:
    folder = Path(__file__).parent.parent
    files = [
        f
        for part in ("rewards", "recipes", "sandbox")
        for f in sorted((folder / part).rglob("*.py"))
    ]
    return hashlib.sha256(
        "".join(hashlib.sha256(f.read_bytes()).hexdigest() for f in files).encode()
    ).hexdigest()
