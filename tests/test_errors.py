from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import errors
from covey.errors import ConfigError, CoveyError, nearest

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
}


def test_every_error_is_a_covey_error_and_the_tree_in_the_docstring_is_complete() -> None:
    assert all(issubclass(kind, CoveyError) for kind in CLASSES.values())
    assert errors.__doc__ is not None
    assert set(re.findall(r"^    (?:[├└]── )?(\w+)", errors.__doc__, re.MULTILINE)) == set(CLASSES)


def test_only_config_errors_are_usage_errors() -> None:
    codes = {name: kind("x").exit_code for name, kind in CLASSES.items()}
    assert codes.pop("ConfigError") == 2
    assert set(codes.values()) == {1}
    assert len(codes) == 7


def test_the_message_is_what_was_said() -> None:
    assert str(ConfigError("config: seed = -1")) == "config: seed = -1"


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("sed", ["seed", "train"], "; did you mean 'seed'?"),
        ("learning-rate", ["beta1", "learning_rate"], "; did you mean 'learning_rate'?"),
        ("gpro", ["gmpo", "grpo", "gspo", "gtpo"], "; did you mean 'grpo'?"),
        ("gpso", ["gmpo", "grpo", "gspo", "gtpo"], "; did you mean 'gspo'?"),
        ("dpao", ["dapo", "dppo"], "; did you mean 'dapo'?"),
        ("zzz", ["train", "seed"], "; choose from seed, train"),
        ("zzz", [], ""),
        ("", ["b", "a"], "; choose from a, b"),
    ],
)
def test_the_hint_is_the_nearest_choice_or_else_all_of_them(
    name: str, choices: list[str], hint: str
) -> None:
    assert nearest(name, choices) == hint
    assert nearest(name, iter(choices)) == hint
    assert nearest(name, dict.fromkeys(choices)) == hint


@given(st.lists(st.text("abcdef_", min_size=1, max_size=8), min_size=1, unique=True), st.data())
@settings(deadline=None)
def test_a_choice_is_nearest_to_itself(choices: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(choices))
    assert nearest(name, choices) == f"; did you mean {name!r}?"
