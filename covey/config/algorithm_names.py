"""Names and titles of the algorithms, available without importing torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from covey.errors import ConfigError, nearest

FAMILIES = Path(__file__).parents[1] / "objective" / "algorithms"


def _declared() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each algorithm, and the arguments of its decorator `algorithm`."""
    # The source code is read, because importing an algorithm imports torch, which takes seconds.
    for file in sorted(FAMILIES.glob("*.py")):
        for function in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "algorithm":
                    given = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
                    yield function.name, given


_DECLARED = dict(_declared())
ALGORITHM_TITLES: Mapping[str, str] = MappingProxyType(
    {name: f"{given['title']}, {given['source']}" for name, given in _DECLARED.items()}
)
"""Title of each algorithm, in the order of `covey.objective.ALGORITHMS`, which has the same
keys."""
ALGORITHM_NAMES = tuple(ALGORITHM_TITLES)
PAIRED = frozenset(name for name, given in _DECLARED.items() if given.get("pairs"))
"""Algorithms that train on preference pairs. A loss over pairs has no importance ratio, and its
`beta` is not the weight of a KL penalty."""
COMPOSED = "composed"
"""The value of `objective.name` for a user's combination of advantage, ratio, surrogate and
weights."""


def check_algorithm_name(name: str) -> None:
    """Raise ConfigError if a name is not the name of an algorithm."""
    if name != COMPOSED and name not in ALGORITHM_NAMES:
        hint = nearest(name, [*ALGORITHM_NAMES, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not a known algorithm{hint}")
