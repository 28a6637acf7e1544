"""Builds an algorithm's function from component functions and the names of its options.

An algorithm lists its component functions (advantage, ratio, surrogate, weights) and its options.
An option's type and default come from the component function that has the option. An algorithm may
override the default of an option.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from covey.errors import ConfigError, nearest
from covey.objective.advantage import (
    ADVANTAGES,
    parts_standardized,
    returns_whitened,
    reward_itself,
)
from covey.objective.distill import READS as TEACHER
from covey.objective.distill import towards_teacher
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
from covey.objective.turns import OF_STATES, OF_TURNS, by_state, by_turn
from covey.objective.weights import WEIGHTS
from covey.trust import is_import_path

Pieces = Mapping[str, Callable[..., Any]]
Algorithm = Callable[..., Objective]

PIECES: Mapping[str, Pieces] = MappingProxyType(
    {
        "advantage": {
            **ADVANTAGES,
            "entropy_shaped_tokens": entropy_shaped_tokens,
            "entropy_shaped_sequences": entropy_shaped_sequences,
            "without_conflicts": without_conflicts,
            "towards_teacher": towards_teacher,
            "by_turn": by_turn,
            "by_state": by_state,
        },
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
        parts_standardized: frozenset({"groups", "parts"}),
        towards_teacher: TEACHER,
        by_turn: OF_TURNS,
        by_state: OF_STATES,
    }
)
"""Maps an advantage function to the inputs that it reads; advantage functions that are not listed
read only "groups"."""


def takes(*names: str) -> Callable[[Algorithm], Algorithm]:
    """Return a decorator that gives an algorithm's function the named options as parameters.

    `names` lists the options in the order in which the algorithm's page shows them. An option is a
    parameter of a component function (such as the advantage), of the KL penalty, or of the
    algorithm's function itself. The value of an option is set in every component function that has
    the option.
    """

    def decorate(pieces: Algorithm) -> Algorithm:
        own, usual = options_of(pieces), pieces()
        parts = _parts(usual)
        known = {k: p for part in reversed(parts.values()) for k, p in options_of(part).items()}
        signature = inspect.Signature([{**known, **own}[name] for name in names])
        hints: dict[str, Any] = {}
        for function in (pieces, *parts.values()):
            hints |= hints_of(function_of(function))

        def algorithm(**options: Any) -> Objective:
            bound = signature.bind(**options)
            bound.apply_defaults()
            given = bound.arguments
            objective = pieces(**{k: given[k] for k in own})
            settled: dict[str, Any] = {k: _settled(f, given) for k, f in _parts(objective).items()}
            with_kl: Algorithm = settled.pop("kl")
            return with_kl(replace(objective, **settled))

        inner = function_of(pieces)
        algorithm.__name__, algorithm.__doc__ = inner.__name__, inner.__doc__
        algorithm.__module__ = inner.__module__  # a user's module is the one to trust
        return signed(algorithm, signature.parameters, {name: hints[name] for name in names})

    return decorate


def _parts(objective: Objective) -> dict[str, Callable[..., Any]]:
    """Return an objective's component functions by kind; the function `kl` sets the KL penalty."""
    kinds = (*PIECES, "marks", "targets", "value_loss")
    functions = {k: f for k in kinds if (f := getattr(objective, k)) is not None}
    name = next(k for k, f in PENALTIES.items() if f is objective.penalty)
    # Pairwise objectives have kl_in = "pair", which is not a value of the option `kl_in`.
    place: Any = objective.kl_in
    kl = partial(_with_kl, beta=objective.beta, kl=name, kl_in=place)
    return {**functions, "kl": kl}


def _with_kl(
    objective: Objective, *, beta: float, kl: Kl, kl_in: Literal["loss", "reward"]
) -> Objective:
    return replace(objective, beta=beta, penalty=PENALTIES[kl], kl_in=kl_in)


def _settled(piece: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    mine = {k: options[k] for k in options_of(piece) if k in options}
    return partial(piece, **mine) if mine else piece


def composed(
    *,
    advantage: str = "standardized",
    ratio: str = "token",
    surrogate: str = "clipped",
    weights: str = "token_mean",
) -> Objective:
    """Return an objective made of the named advantage, ratio, surrogate and weights."""
    names = {"advantage": advantage, "ratio": ratio, "surrogate": surrogate, "weights": weights}
    for kind, name in names.items():
        if not isinstance(name, str) or name not in PIECES[kind]:
            hint = nearest(str(name), PIECES[kind])
            if is_import_path(str(name)):
                hint = (
                    "; a function of your own is an algorithm: set objective.name = "
                    f"'MODULE:FUNCTION' to a function that returns an Objective with your {kind}"
                )
            raise ConfigError(f"config: objective.{kind} = {name!r} is not a known value{hint}")
    pieces: dict[str, Any] = {kind: PIECES[kind][name] for kind, name in names.items()}
    return Objective(**pieces, reads=READS.get(pieces["advantage"], COMPARES))


def composer(given: Mapping[str, Any]) -> Algorithm:
    """Return an algorithm made of the functions that `given` names, with their options."""
    pieces = partial(composed, **{kind: given[kind] for kind in PIECES if kind in given})
    objective = pieces()
    options = [name for kind in PIECES for name in options_of(getattr(objective, kind))]
    return takes(*PIECES, *options, "beta", "kl")(pieces)


def function_of(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `partial`; return any other function unchanged."""
    return piece.func if isinstance(piece, partial) else piece


def option(piece: Callable[..., Any], name: str) -> Any:
    """Return the value of a function's option; None if the function has no such option."""
    parameter = options_of(piece).get(name)
    return None if parameter is None else parameter.default


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a function: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.items()
    return {k: p for k, p in parameters if p.kind is p.KEYWORD_ONLY}


def hints_of(
    function: Callable[..., Any], options: Mapping[str, inspect.Parameter] | None = None
) -> dict[str, Any]:
    """Return the type of each option; by default, all keyword-only parameters are options."""
    options = options_of(function) if options is None else options
    # Other annotations name types of torch, which `covey plan` does not import.
    written = getattr(function, "__annotations__", {})
    of_options = SimpleNamespace(__annotations__={k: written[k] for k in written if k in options})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(of_options, names)
    except (NameError, TypeError):  # a user's annotations may exist for type checkers only
        return {}


def signed(
    function: Callable[..., Objective],
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
) -> Callable[..., Objective]:
    """Replace the `**options` of a function by an explicit signature."""
    signature = inspect.Signature(list(parameters.values()))
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = dict(hints)
    return function
