"""The identity of a reward: name, version and source hash, recorded with every rollout."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from covey.rewards.source import source_hash

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
    sources.add(_source_of(value if inspect.isroutine(value) else type(value)))
    if state is not None:
        return f"{type(value).__qualname__}({inner(state)})"
    return f"{value.__module__}:{value.__qualname__}" if inspect.isroutine(value) else _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _source_of(thing: Any) -> str:
    if str(thing.__module__).startswith("covey."):
        return _own_source()
    return source_hash(thing)


@cache
def _own_source() -> str:
    folder = Path(__file__).parent.parent
    files = [
        f
        for part in ("rewards", "recipes", "sandbox")
        for f in sorted((folder / part).rglob("*.py"))
    ]
    return hashlib.sha256("".join(_file_hash(f) for f in files).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
