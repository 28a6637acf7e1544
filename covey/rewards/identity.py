"""Which reward it was: name, version and a hash of its source, recorded with every answer."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


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


def _describe(value: Any) -> str:
    """Write a reward and its options down; a function by its name, not by its address."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{type(value).__qualname__}({_describe(fields)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_describe(v) for v in value) + "]"
    if inspect.isroutine(value):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value) if isinstance(value, str | int | float | bool | None) else _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _sources(value: Any) -> set[str]:
    """Return the hashes of all source that a reward, and the rewards inside it, run."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return {_source_of(type(value)), *_inner(inner)}
    if isinstance(value, Mapping):
        return _inner(list(value.values()))
    if isinstance(value, list | tuple):
        return _inner(list(value))
    if isinstance(value, str | int | float | bool | None):
        return set()
    return {_source_of(value if inspect.isroutine(value) else type(value))}


def _inner(values: list[Any]) -> set[str]:
    return {source for value in values for source in _sources(value)}


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
