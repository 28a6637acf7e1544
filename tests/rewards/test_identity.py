"""The identity of a reward: the same identity means the same scores."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covey.rewards import ThinkAnswer, as_reward
from covey.rewards.identity import identity
from tests.scoring import rewards


def test_it_names_the_reward_its_version_and_a_hash() -> None:
    name, _, digest = identity("think_answer", ThinkAnswer()).partition("@1#")
    assert name == "think_answer"
    assert len(digest) == 12
    int(digest, 16)
    assert identity("counting", rewards.Counting(word="x")).startswith("counting@7#")


def test_options_change_it() -> None:
    assert identity("r", ThinkAnswer()) != identity("r", ThinkAnswer(format=0.2))
    assert identity("r", ThinkAnswer()) == identity("r", ThinkAnswer())
    plain = [as_reward(rewards.plain, options) for options in ({}, {"scale": 2.0})]
    assert identity("r", plain[0]) != identity("r", plain[1])
    assert identity("r", as_reward(rewards.plain)) != identity("r", as_reward(rewards.half_marks))


def test_what_a_user_s_object_was_made_with_changes_it() -> None:
    def of(judge: Any) -> str:
        return identity("r", as_reward(judge))

    for made in (
        lambda word: rewards.Counting(word=word),  # a reward of its own
        lambda word: rewards.Listed(words={word, "b"}),  # dressed as one
        lambda word: rewards.Listed(words={word, "b"}).judge,
        lambda word: partial(rewards.plain, scale=len(word)),
    ):
        assert of(made("x")) == of(made("x")) != of(made("yy"))
    assert of(partial(rewards.plain)) != of(partial(rewards.half_marks))


def test_an_object_that_holds_itself_has_one() -> None:
    judge = rewards.Listed(words=set())
    judge.words = [judge]
    assert identity("r", as_reward(judge)).startswith("r@1#")


def test_the_user_s_source_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_reward_source.py"
    identities = []
    for value in ("1.0", "2.0", "1.0"):
        file.write_text(f"def f(prompt, text):\n    return {value}\n")
        module = importlib.import_module("own_reward_source")
        identities.append(identity("own", as_reward(module.f)))
    assert identities[0] == identities[2] != identities[1]


def test_what_is_typed_into_a_prompt_has_one_too() -> None:
    made = [eval(f"lambda prompt, text: {x}") for x in ("1.0", "2.0")]
    first, second = (identity("typed", as_reward(f)) for f in made)
    assert first != second


def test_it_is_the_same_in_another_process() -> None:
    code = (
        "from covey.rewards import ThinkAnswer, as_reward\n"
        "from covey.rewards.identity import identity\nfrom tests.scoring import rewards\n"
        "print(identity('think_answer', ThinkAnswer()))\n"
        "print(identity('listed', as_reward(rewards.Listed(words=set('abcdef')))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = as_reward(rewards.Listed(words=set("abcdef")))
    assert done.stdout.split() == [
        identity("think_answer", ThinkAnswer()),
        identity("listed", listed),
    ]


REWARDS = """import math
UNIT = 0.5
OTHER = 3

def unused(text):
    return 1

def helper(text):
    return len(text) * UNIT

class Shape:
    def area(self, text):
        return helper(text)

def reward(prompt, text):
    return Shape().area(text) + math.pi

def make(weight):
    def inner(prompt, text):
        return weight * helper(text)
    return inner

made = make(2.0)
pair = lambda prompt, text: len(text)  # one line
"""


def identity_of(text: str, name: str, folder: Path) -> str:
    """Return the identity of a function in a module with the given text."""
    namespace: dict[str, Any] = {"__name__": "own"}
    file = folder / f"own_{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    exec(compile(text, str(file), "exec"), namespace)
    return identity("own", as_reward(namespace[name]))


def test_only_what_a_reward_refers_to_in_its_file_changes_it(tmp_path: Path) -> None:
    def of(name: str, old: str = "", new: str = "") -> str:
        assert old in REWARDS
        return identity_of(REWARDS.replace(old, new) if old else REWARDS, name, tmp_path)

    for same in (
        ("OTHER = 3", "OTHER = 4"),
        ("return 1", "return 2"),
        ("UNIT = 0.5", "# half\n\nUNIT = (0.5)"),
        ("def helper(text):", "def helper(\n    text,  # what it says\n):"),
        ("def helper(text):", 'def helper(text):\n    "How long."'),
        ("def unused(text):\n    return 1\n", ""),
        ("  # one line", ""),
    ):
        for name in ("reward", "made", "pair"):
            assert of(name) == of(name, *same), same
    for other in (("UNIT = 0.5", "UNIT = 0.6"), ("len(text) * UNIT", "UNIT")):
        assert of("reward") != of("reward", *other)
        assert of("made") != of("made", *other)
        assert of("pair") == of("pair", *other)
    assert of("reward") != of("reward", "return helper(text)\n\ndef r", "return 2\n\ndef r")
    assert of("reward") != of("reward", "import math", "import cmath as math")
    assert of("made") != of("made", "make(2.0)", "make(3.0)")
    assert of("made") == of("made", "math.pi", "math.e") != of("reward")
    assert of("pair") != of("pair", "text: len(text)", "text: 2")
