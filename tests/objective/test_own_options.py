"""What a user reads about functions of their own: descriptions of options, and hints."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.objective import Objective, build
from covey.objective.describe import describe
from covey.trust import scoped_trust, trust


def steady(*, width: float = 0.2, height: int = 1, clip_low: float = 0.1) -> Objective:
    """Train steadily.

    Args:
        width: Half of the interval, in which
            the ratio may move.
        clip_low: My own lower bound.
    """
    return build("grpo")


def fields(*, width: float = 0.2) -> Objective:
    """Train steadily.

    :param width: Half of the interval.
    """
    return build("grpo")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("own_options_of_a_test")
    mine.steady, mine.fields = steady, fields  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, mine.__name__, mine)


def test_options_of_an_own_algorithm_have_the_descriptions_of_its_docstring() -> None:
    with scoped_trust():
        trust(["own_options_of_a_test"])
        lines = {o.name: o.meaning for o in describe("own_options_of_a_test:steady").own}
        assert lines["width"] == "Half of the interval, in which the ratio may move."
        assert lines["clip_low"] == "My own lower bound."
        assert lines["height"] == ""
        (option,) = describe("own_options_of_a_test:fields").own
        assert option.meaning == "Half of the interval."


@pytest.mark.parametrize("kind", ["advantage", "ratio", "surrogate", "weights"])
def test_an_own_function_in_the_place_of_a_piece_is_shown_the_way(kind: str) -> None:
    config = load_config(None, [f"objective.{kind}=my_algo:f"])
    with pytest.raises(ConfigError, match=rf"objective\.{kind} = 'my_algo:f'.*objective\.name"):
        resolve(config)
