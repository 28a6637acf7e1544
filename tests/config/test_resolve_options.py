from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from covey.config import load_config, recipe_names, to_toml
from covey.config.resolve import objective_of, resolve, reward_of, task_of
from covey.config.resolve_options import choose, resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError
from covey.rewards.registry import REWARDS
from covey.tasks.registry import TASKS

if TYPE_CHECKING:
    from fractions import Fraction


def blend(
    *,
    rate: float,
    rounds: int = 3,
    mode: Literal["hot", "cold"] = "hot",
    fast: bool = False,
    words: list[str] | None = None,
) -> None:
    """Stand for an algorithm: a function of keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blender:
    """Stand for a task: a dataclass that has a name, which is not an option."""

    rate: float
    rounds: int = 3
    mode: Literal["hot", "cold"] = "hot"
    fast: bool = False
    words: list[str] | None = None
    name: str = "blender"


FUNCTIONS = [blend, Blender]
DEFAULTS = {"rounds": 3, "mode": "hot", "fast": False, "words": None}


def section(**options: Any) -> Named:
    return Named.model_validate({"name": "blend", **options})


def error_of(function: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve_options(function, section(**options), "task")
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("function", FUNCTIONS)
def test_given_options_are_kept_and_the_others_take_their_defaults(function: Any) -> None:
    assert resolve_options(function, section(rate=0.5), "task") == {"rate": 0.5, **DEFAULTS}
    given = {"rate": 0.5, "rounds": 1, "mode": "cold", "fast": True, "words": ["a", "b"]}
    assert resolve_options(function, section(**given), "task") == given


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_integer_is_good_enough_for_a_float_and_becomes_one(function: Any) -> None:
    rate = resolve_options(function, section(rate=1), "task")["rate"]
    assert (rate, type(rate)) == (1.0, float)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_resolving_what_was_resolved_changes_nothing(function: Any) -> None:
    once = resolve_options(function, section(rate=0.5, words=["x"]), "task")
    assert resolve_options(function, section(**once), "task") == once


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rate": 1.0, "round": 2},
            "config: task.round is not an option of blend; did you mean 'rounds'?",
        ),
        (
            {"rate": 1.0, "zzz": 2},
            "config: task.zzz is not an option of blend; "
            "choose from fast, mode, rate, rounds, words",
        ),
        ({}, "config: task.rate must be set for blend, because it has no default"),
        ({"rate": "fast"}, "config: task.rate = 'fast': input should be a valid number"),
        ({"rate": True}, "config: task.rate = True: input should be a valid number"),
        ({"rate": float("inf")}, "config: task.rate = inf: input should be a finite number"),
        ({"rate": float("nan")}, "config: task.rate = nan: input should be a finite number"),
        (
            {"rate": 1.0, "rounds": 2.0},
            "config: task.rounds = 2.0: input should be a valid integer",
        ),
        (
            {"rate": 1.0, "rounds": True},
            "config: task.rounds = True: input should be a valid integer",
        ),
        ({"rate": 1.0, "fast": 1}, "config: task.fast = 1: input should be a valid boolean"),
        ({"rate": 1.0, "mode": "warm"}, "config: task.mode = 'warm': input should be 'hot' or"),
        ({"rate": 1.0, "words": "ab"}, "config: task.words = 'ab': input should be a valid list"),
        ({"rate": 1.0, "rounds": "1\n2"}, "config: task.rounds = '1\\n2': input should be"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_named_with_its_value(
    function: Any, options: dict[str, Any], message: str
) -> None:
    assert error_of(function, **options).startswith(message)


def test_the_name_of_a_dataclass_is_not_an_option() -> None:
    assert "name" not in resolve_options(Blender, section(rate=1.0), "task")
    assert "name" not in error_of(Blender, rate=1.0, zzz=1)


def half_known(*, share: Fraction | None = None, rounds: int = 3) -> None:
    """Have an annotation that only type checkers can read."""


def anything(rate: float, *others: int, **options: Any) -> None:
    """Take any option."""


def numbers(**options: int) -> None:
    """Take any option that is a whole number."""


def listed(rate: float, *others: int) -> None:
    """Take what has no name, which a configuration cannot give."""


def test_types_that_cannot_be_found_out_are_not_checked() -> None:
    given = {"share": 0.5, "rounds": 2}
    assert resolve_options(half_known, section(**given), "task") == given
    assert resolve_options(half_known, section(), "task") == {"share": None, "rounds": 3}
    message = "config: task.round is not an option of blend; did you mean 'rounds'?"
    assert error_of(half_known, round=2) == message


def test_a_function_of_any_options_is_given_them_all() -> None:
    given = {"rate": 0.5, "options": 1, "others": [2]}
    assert resolve_options(anything, section(**given), "task") == given
    assert resolve_options(anything, section(rate=1), "task") == {"rate": 1.0}
    assert (
        error_of(anything, zzz=1)
        == "config: task.rate must be set for blend, because it has no default"
    )
    assert resolve_options(numbers, section(a=1, b=2), "task") == {"a": 1, "b": 2}
    assert error_of(numbers, a="x").startswith("config: task.a = 'x': input should be a valid int")


def test_what_has_no_name_is_not_an_option() -> None:
    assert resolve_options(listed, section(rate=1), "task") == {"rate": 1.0}
    message = "config: task.others is not an option of blend; choose from rate"
    assert error_of(listed, rate=1, others=[2]) == message


def test_a_section_names_its_function() -> None:
    registry = {"blend": blend, "blender": Blender}
    assert choose(registry, section(), "objective") is blend


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        choose({"grpo": blend, "dapo": blend}, Named(name="gropo"), "objective")
    message = "config: objective.name = 'gropo' is not a known name; did you mean 'grpo'?"
    assert str(raised.value) == message
    with pytest.raises(ConfigError, match=r"is not a known name; choose from dapo, grpo$"):
        choose({"grpo": blend, "dapo": blend}, Named(name="zzz"), "objective")


@pytest.mark.parametrize("recipe", [None, *recipe_names()])
def test_every_recipe_names_functions_that_take_its_options(recipe: str | None) -> None:
    config = load_config(recipe)
    resolved = resolve(config)
    for where in ("task", "reward", "objective", "length_penalty"):
        given, written = getattr(config, where).options, getattr(resolved, where).options
        assert json.dumps({name: written[name] for name in given}) == json.dumps(given)
    for make in (task_of, reward_of, objective_of):
        make(resolved)


def test_the_options_of_the_embedded_task_are_all_written_out() -> None:
    resolved = resolve_options(TASKS["arithmetic"], Named(name="arithmetic"), "task")
    assert resolved == {
        "min_operations": 2,
        "max_operations": 4,
        "train_size": 100_000,
        "held_out_size": 256,
    }


def test_the_files_of_a_jsonl_task_must_be_given() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^config: task\.train_file must be set for jsonl, because it has no default$",
    ):
        resolve_options(TASKS["jsonl"], Named(name="jsonl"), "task")


# These have no default for what they are made of.
MADE_OF_OTHERS = {"by_task", "judge", "mix", "sum"}


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - MADE_OF_OTHERS))
def test_the_reward_of_a_run_can_be_read_back_from_its_file(name: str, tmp_path: Path) -> None:
    config = resolve(load_config("arithmetic", [f"reward.name={name}"]))
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    again = resolve(load_config(str(file)))
    assert again == config
    assert reward_of(again) == reward_of(config)
