"""Descriptions of algorithms, for `covey algorithms` and for the pages under docs/algorithms.

A description is generated from the code: from the docstring, the signature, the table of options,
and the objective's component functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from covey.docstrings import described_arguments
from covey.objective.algorithms import ALGORITHMS
from covey.objective.build import PIECES, build, extended, find_algorithm
from covey.objective.loss import Need, Objective
from covey.objective.options import OPTIONS, function_of, options_of
from covey.objective.penalty import PENALTIES


class OptionLine(NamedTuple):
    """One option of an algorithm."""

    name: str
    default: str
    meaning: str


class Description(NamedTuple):
    """The description of an algorithm."""

    name: str
    title: str
    text: str
    """The docstring of the algorithm, without its title; formulas are indented."""
    own: list[OptionLine]
    pieces: dict[str, str]
    """The names of the objective's advantage, ratio, surrogate and weights functions."""
    clip: str
    kl: str
    needs: list[str]


def describe(name: str) -> Description:
    """Describe an algorithm."""
    function = find_algorithm(name)
    shared = {} if name in ALGORITHMS else options_of(extended)
    own = {k: p for k, p in options_of(ALGORITHMS.get(name, function)).items() if k not in shared}
    required = {k: 1 for k, p in own.items() if p.default is p.empty}
    objective = build(name, **required)
    documented = {} if name in ALGORITHMS else described_arguments(inspect.getdoc(function) or "")
    text = inspect.getdoc(function) or name
    if name in ALGORITHMS:
        title = f"{vars(ALGORITHMS[name])['title']}."
    else:
        title, _, text = text.partition("\n")
    return Description(
        name=name,
        title=title,
        text=text.strip("\n"),
        own=[_option(k, p, documented) for k, p in own.items()],
        pieces={kind: _name_of(getattr(objective, kind), PIECES[kind]) for kind in PIECES},
        clip=_clip(own),
        kl=_kl(objective),
        needs=[shown for need, shown in SHOWN_NEEDS.items() if need in objective.needs],
    )


def shared_options() -> list[OptionLine]:
    """Return the options that every algorithm has."""
    return [_option(k, p) for k, p in options_of(extended).items()]


def _option(
    name: str, parameter: inspect.Parameter, documented: Mapping[str, str] = {}
) -> OptionLine:
    """Describe an option; `documented` has what a user's docstring says about it."""
    given = parameter.default is parameter.empty
    meaning = documented.get(name) or (OPTIONS[name].meaning if name in OPTIONS else "")
    return OptionLine(name, "given" if given else _text(parameter.default), meaning)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:g}").replace("e+", "e")
    return str(value)


def _name_of(piece: Callable[..., Any], known: Mapping[Any, Callable[..., Any]]) -> str:
    function = function_of(piece)
    names: dict[Callable[..., Any], str] = {f: n for n, f in known.items()}
    return names.get(function, getattr(function, "__name__", "own"))


def _clip(own: dict[str, inspect.Parameter]) -> str:
    if {"clip_low", "clip_high"} <= own.keys():
        return f"{_text(own['clip_low'].default)} / {_text(own['clip_high'].default)}"
    if "max_weight" in own:
        return f"weight up to {_text(own['max_weight'].default)}"
    return "none"


def _kl(objective: Objective) -> str:
    if not objective.beta:
        return "off"
    if objective.pairs:
        return f"{_text(objective.beta)} in the pair"
    penalty = _name_of(objective.penalty, PENALTIES)
    return f"{_text(objective.beta)} {penalty} in {objective.kl_in}"


SHOWN_NEEDS: Mapping[Need, str] = MappingProxyType(
    {
        "reference": "reference",
        "old_entropy": "entropy",
        "success": "success",
        "tokens": "tokens",
        "parts": "reward parts",
        "teacher": "teacher",
        "privileged": "privileged text",
        "values": "critic",
        "sampler_as_old": "sampler_logp",
        "turns": "turns",
        "states": "states",
        "marks": "extra forward",
    }
)
"""Maps an input of an objective to its label in descriptions; descriptions omit inputs without a
label."""


COLUMNS = ("name", "advantage", "ratio", "surrogate", "clip", "weights", "KL", "needs")


def row(description: Description) -> tuple[str, ...]:
    """Return the table row of an algorithm, with a cell for each of `COLUMNS`."""
    pieces = description.pieces
    return (
        description.name,
        pieces["advantage"],
        pieces["ratio"],
        pieces["surrogate"],
        description.clip,
        pieces["weights"],
        description.kl,
        ", ".join(description.needs) or "-",
    )
