"""The options of all algorithms: their order, defaults, types and meanings, as recorded."""

from __future__ import annotations

import inspect
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from covey.objective import ALGORITHMS, find_algorithm
from covey.objective.build import extended
from covey.objective.options import OPTIONS, hints_of, options_of

RECORDED = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))


def listed(function: Any) -> dict[str, list[Any]]:
    """Return the default (null: none) and the type of each option, as JSON has them."""
    hints = hints_of(function)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        hint, default = hints[name], parameter.default
        choices = list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else None
        kind = choices or (hint.__name__ if type(hint) is type else str(hint))
        found[name] = [None if default is parameter.empty else default, kind]
    return typing.cast("dict[str, list[Any]]", json.loads(json.dumps(found)))


@pytest.mark.parametrize("name", RECORDED["own"])
def test_an_algorithm_has_the_recorded_options(name: str) -> None:
    own, shared = RECORDED["own"][name], RECORDED["shared"]
    whole = own | {key: shared[key] for key in shared if key not in own}
    assert list(listed(find_algorithm(name)).items()) == list(whole.items())
    assert list(listed(ALGORITHMS[name]).items()) == list(own.items())


def test_shared_options_are_the_recorded_ones() -> None:
    assert listed(extended) == RECORDED["shared"]


def test_options_have_the_recorded_meanings() -> None:
    used = {key for name in RECORDED["own"] for key in options_of(find_algorithm(name))}
    assert {key: OPTIONS[key].meaning for key in used} == RECORDED["meanings"]
