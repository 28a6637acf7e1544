"""Which reward it was: name, version and a hash of its source, recorded with every answer."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import marshal
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

_PLAIN = str | bytes | int | float | bool | None


def identity(name: str, reward: Any) -> str:
    """Return for example `math@1#9f2c51d0a3b4`.

    The hash covers the options and the source: of a reward of Covey's the packages that judge,
    of a user's the file that it stands in. Two runs with the same identity judged alike.

    >>> from covey.rewards.think_answer import ThinkAnswer
    >>> identity("think_answer", ThinkAnswer()).startswith("think_answer@1#")
    True
    """
    digest = hashlib.sha256()
    for line in sorted(_sources(reward)):
        digest.update(line.encode())
    digest.update(_describe(reward).encode())
    return f"{name}@{reward.version}#{digest.hexdigest()[:12]}"


def _made_of(value: Any) -> Mapping[str, Any] | None:
    """Return what a judge consists of, the same that a scoring process is sent; None of others."""
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


def _describe(value: Any, around: tuple[int, ...] = ()) -> str:
    """Write a reward and its options down; a function by its name, not by its address."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in around:  # what holds itself
        return _kind(value)
    around = (*around, id(value))
    if (inner := _made_of(value)) is not None:
        return f"{type(value).__qualname__}({_describe(inner, around)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v, around)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_describe(v, around) for v in value) + "]"
    if isinstance(value, set | frozenset):  # in an order that is another in every process
        return "{" + ", ".join(sorted(_describe(v, around) for v in value)) + "}"
    return f"{value.__module__}:{value.__qualname__}" if inspect.isroutine(value) else _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _sources(value: Any, around: tuple[int, ...] = ()) -> set[str]:
    """Return the hashes of all source that a reward, and the rewards inside it, run."""
    if isinstance(value, _PLAIN) or id(value) in around:
        return set()
    around = (*around, id(value))
    inner = _made_of(value)
    if inner is None and isinstance(value, Mapping):
        return _inner(value.values(), around)
    if inner is None and isinstance(value, list | tuple | set | frozenset):
        return _inner(value, around)
    own = _source_of(value if inspect.isroutine(value) else type(value))
    return {own, *_inner((inner or {}).values(), around)}


def _inner(values: Iterable[Any], around: tuple[int, ...]) -> set[str]:
    return {source for value in values for source in _sources(value, around)}


def _source_of(thing: Any) -> str:
    if str(thing.__module__).startswith("covey."):
        return _own_source()
    try:
        return _file_hash(Path(inspect.getfile(thing)))
    except (OSError, TypeError):  # typed into a prompt: there is no file, but there is code
        code = getattr(thing, "__code__", None)
        return hashlib.sha256(marshal.dumps(code) if code else repr(thing).encode()).hexdigest()


@cache
def _own_source() -> str:
    folder = Path(__file__).parent.parent
    files = [f for part in ("rewards", "sandbox") for f in sorted((folder / part).rglob("*.py"))]
    return hashlib.sha256("".join(_file_hash(f) for f in files).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
