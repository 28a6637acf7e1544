"""An objective put together from named pieces, with whatever options those pieces have."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from covey.errors import ConfigError, nearest
from covey.objective.advantage import ADVANTAGES, returns_whitened, reward_itself
from covey.objective.loss import Need, Objective
from covey.objective.penalty import PENALTIES, Kl
from covey.objective.ratio import RATIOS
from covey.objective.shaping import (
    SHAPED_BY_ENTROPY,
    WITHOUT_CONFLICTS,
    entropy_shaped_sequences,
    entropy_shaped_tokens,
    without_conflicts,
)
from covey.objective.surrogate import SURROGATES
from covey.objective.turns import by_state, by_turn
from covey.objective.weights import WEIGHTS

Pieces = Mapping[str, Callable[..., Any]]

SHAPED: Pieces = MappingProxyType(
    {
        "entropy_shaped_tokens": entropy_shaped_tokens,
        "entropy_shaped_sequences": entropy_shaped_sequences,
        "without_conflicts": without_conflicts,
    }
)
TURNS: Pieces = MappingProxyType({"by_turn": by_turn, "by_state": by_state})
PIECES: Mapping[str, Pieces] = MappingProxyType(
    {
        "advantage": {**ADVANTAGES, **SHAPED, **TURNS},
        "ratio": RATIOS,
        "surrogate": SURROGATES,
        "weights": WEIGHTS,
    }
)
COMPARES: frozenset[Need] = frozenset({"groups"})
READS: Mapping[Callable[..., Any], frozenset[Need]] = MappingProxyType(
    {
        reward_itself: frozenset(),
        returns_whitened: frozenset(),
        entropy_shaped_tokens: SHAPED_BY_ENTROPY,
        entropy_shaped_sequences: SHAPED_BY_ENTROPY,
        without_conflicts: WITHOUT_CONFLICTS,
    }
)
"""What advantages read that do more than compare the rewards of a group, or less."""
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "advantage": "standardized",
        "ratio": "token",
        "surrogate": "clipped",
        "weights": "token_mean",
    }
)


def function_of(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Return a piece of an objective without its options."""
    return piece.func if isinstance(piece, partial) else piece


def composer(given: Mapping[str, Any]) -> Callable[..., Objective]:
    """Return a function of all options of the pieces that `given` names, or of the default ones."""
    chosen = {kind: _chosen(kind, given.get(kind, DEFAULTS[kind])) for kind in PIECES}

    def composed(*, beta: float = 0.0, kl: Kl = "k3", **options: Any) -> Objective:
        """Put together from pieces."""
        pieces: dict[str, Any] = {k: _settled(f, options) for k, f in chosen.items()}
        return Objective(
            **pieces,
            penalty=PENALTIES[kl],
            beta=beta,
            reads=READS.get(chosen["advantage"], COMPARES),
        )

    parameters, hints = dict(_kinds()), {kind: str for kind in PIECES}
    for function in (*chosen.values(), composed):
        parameters |= options_of(function)
        hints |= hints_of(function)
    return signed(composed, parameters, hints)


def _chosen(kind: str, name: Any) -> Callable[..., Any]:
    registry = PIECES[kind]
    if not isinstance(name, str) or name not in registry:
        hint = nearest(str(name), registry)
        raise ConfigError(f"config: objective.{kind} = {name!r} is not known{hint}")
    return registry[name]


def _settled(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    mine = {k: options[k] for k in options_of(function) if k in options}
    return partial(function, **mine) if mine else function


def _kinds() -> Mapping[str, inspect.Parameter]:
    only = inspect.Parameter.KEYWORD_ONLY
    return {k: inspect.Parameter(k, only, default=d, annotation=str) for k, d in DEFAULTS.items()}


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters: what is not data is an option."""
    parameters = inspect.signature(function).parameters.items()
    return {k: p for k, p in parameters if p.kind is p.KEYWORD_ONLY}


def hints_of(
    function: Callable[..., Any], options: Mapping[str, inspect.Parameter] | None = None
) -> dict[str, Any]:
    """Return the types of the options, by default of those that are keyword-only."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a user's annotations may be there for type checkers only
        return {}
    options = options_of(function) if options is None else options
    return {k: h for k, h in hints.items() if k in options}


def signed(
    function: Callable[..., Objective],
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
) -> Callable[..., Objective]:
    """Give a function with **options an explicit signature."""
    signature = inspect.Signature(list(parameters.values()))
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = dict(hints)
    return function
