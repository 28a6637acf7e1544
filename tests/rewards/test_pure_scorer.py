"""COVEY_EXAMPLES=200 compares as many answers of each data set; the usual run compares fewer."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, getcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")
from reasoning_gym.composite import CompositeConfig, CompositeDataset
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from covey.rewards.gym import scorer as gym_scorer
from covey.rewards.gym.pure_scorer import (
    MOST_CHARACTERS,
    PATTERNS,
    ImpureError,
    attributes_of,
    is_pure,
)
from covey.rewards.reasoning_gym import _SCORER, ReasoningGym
from covey.sandbox.scorer import sandboxed
from covey.tasks.reasoning_gym import ReasoningGym as GymTask
from covey.tasks.reasoning_gym import entry_of
from covey.types import Prompt

COUNT = int(os.environ.get("COVEY_EXAMPLES", "2"))
PURE = """
    ab chain_sum circuit_logic color_cube_rotation cryptarithm decimal_chain_sum dice emoji_mystery
    family_relationships figlet_font futoshiki game_of_life game_of_life_halting graph_color
    group_anagrams gsm_symbolic knight_swap letter_jumble manipulate_matrix mini_sudoku
    needle_haystack number_format palindrome_generation palindrome_partitioning path_star
    polynomial_equations prime_factorization products quantum_lock rectangle_count self_reference
    sentence_reordering shortest_path spell_backward sudoku time_intervals tsumego word_sorting
    zebra_puzzles
"""
"""Data sets with a scorer of their own that runs in the scoring process."""


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some data sets ask for one, because they differ from process to process without."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def proved(scorer: type, config: type) -> bool:
    try:
        attributes_of(scorer, config)
    except ImpureError:
        return False
    return True


def test_which_scorers_are_pure() -> None:
    pure = {name for name, (scorer, config) in DATASETS.items() if proved(scorer, config)}
    own = {n for n in pure if DATASETS[n][0].score_answer is not ProceduralDataset.score_answer}
    assert own == set(PURE.split())
    common = {
        n for n, (s, _) in DATASETS.items() if s.score_answer is ProceduralDataset.score_answer
    }
    assert pure == own | common
    assert {"basic_arithmetic", "gcd", "letter_counting"} <= common


def test_no_scorer_that_evaluates_is_pure() -> None:
    for name in (*gym_scorer.EVALUATING, "bitwise_arithmetic", "number_sorting", "composite"):
        assert not proved(*DATASETS[name]), name
    assert not proved(CompositeDataset, CompositeConfig)


# ---- what makes a scorer impure ----

evaluate = eval
TABLE = {"run": eval}
SHARED: list[str] = []


def helper(text: str) -> Any:
    return eval(text)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments)


@dataclass
class Config:
    tolerance: float = 0.1

    def validate(self) -> None:
        eval("0")


class Base:
    def __init__(self) -> None:
        self.config = Config()

    def other(self, text: str) -> Any:
        return eval(text)

    def validate(self) -> None: ...


def scorer_of(function: Any, **more: Any) -> type:
    return type("Made", (Base,), {"score_answer": function, **more})


def _nested(self: Any, answer: str, entry: Any) -> Any:
    def inner() -> Any:
        return eval(answer)

    return inner()


def _import(self: Any, answer: str, entry: Any) -> Any:
    import os

    return os.system(answer)


def _class(self: Any, answer: str, entry: Any) -> Any:
    class Inner:
        value = eval(answer)

    return Inner.value


def _super(self: Any, answer: str, entry: Any) -> Any:
    return super(type(self), self).other(answer)


def _while(self: Any, answer: str, entry: Any) -> Any:
    number = int(answer)
    while number:
        number -= 1
    return 0


def _sets(self: Any, answer: str, entry: Any) -> Any:
    self.last = answer


def _opens(self: Any, answer: str, entry: Any) -> Any:
    with open(answer) as file:
        return file.read()


def _shares(self: Any, answer: str, entry: Any) -> Any:
    SHARED.append(answer)
    return len(SHARED)


def _global(self: Any, answer: str, entry: Any) -> Any:
    global evaluate
    evaluate = answer  # type: ignore[assignment]


def _default(self: Any, answer: str, entry: Any, run: Any = eval) -> Any:
    return run(answer)


def _grows(self: Any, answer: str, entry: Any, seen: Any = SHARED) -> Any:
    return seen.append(answer)


IMPURE: dict[str, type] = {
    "eval": scorer_of(lambda self, answer, entry: eval(answer)),
    "an alias": scorer_of(lambda self, answer, entry: evaluate(answer)),
    "a table of functions": scorer_of(lambda self, answer, entry: TABLE["run"](answer)),
    "getattr": scorer_of(lambda self, answer, entry: getattr(answer, "format")()),  # noqa: B009
    "a nested function": scorer_of(_nested),
    "a lambda": scorer_of(lambda self, answer, entry: (lambda text: eval(text))(answer)),
    "a comprehension": scorer_of(lambda self, answer, entry: [eval(t) for t in answer.split()]),
    "a generator": scorer_of(lambda self, answer, entry: sum(eval(t) for t in answer.split())),
    "super": scorer_of(_super),
    "a method": scorer_of(lambda self, answer, entry: self.other(answer)),
    "a method as a value": scorer_of(lambda self, answer, entry: list(map(self.other, answer))),
    "a helper": scorer_of(lambda self, answer, entry: helper(answer)),
    "a class attribute": scorer_of(lambda self, answer, entry: self.run(answer), run=eval),
    "a static method": scorer_of(
        lambda self, answer, entry: self.run(answer), run=staticmethod(helper)
    ),
    "a property": scorer_of(lambda self, answer, entry: self.run, run=property(helper)),
    "a decorated scorer": scorer_of(decorated(lambda self, answer, entry: 0.0)),
    "a callable object": scorer_of(SimpleNamespace(__call__=eval)),
    "a default": scorer_of(_default),
    "a default that grows": scorer_of(_grows),
    "an import": scorer_of(_import),
    "a class": scorer_of(_class),
    "a context manager": scorer_of(_opens),
    "str.format": scorer_of(lambda self, answer, entry: answer.format(self)),
    "str.format that the scorer has too": scorer_of(
        lambda self, answer, entry: answer.format(self), format=lambda self: 0
    ),
    "a method of the config": scorer_of(lambda self, answer, entry: self.config.validate()),
    "the config itself": scorer_of(lambda self, answer, entry: len(self.config)),
    "a format with a width": scorer_of(lambda self, answer, entry: f"{answer:{answer}}"),
    "an attribute of Python's own": scorer_of(lambda self, answer, entry: answer.__class__),
    "an attribute in an f-string": scorer_of(lambda self, answer, entry: f"{answer.__class__}"),
    "an unknown attribute": scorer_of(lambda self, answer, entry: self.unknown),
    "an unknown name": scorer_of(lambda self, answer, entry: unknown),  # type: ignore[name-defined]  # noqa: F821
    "a module": scorer_of(lambda self, answer, entry: len(math)),  # type: ignore[arg-type]
    "an unknown function": scorer_of(lambda self, answer, entry: math.factorial(int(answer))),
    "a pattern of the text": scorer_of(lambda self, answer, entry: re.match(answer, "x")),
    "an unknown pattern": scorer_of(lambda self, answer, entry: re.match("(x+)+y", answer)),
    "% on text": scorer_of(lambda self, answer, entry: answer % 1),
    "a power": scorer_of(lambda self, answer, entry: 10 ** int(answer)),
    "a shift": scorer_of(lambda self, answer, entry: 1 << int(answer)),
    "a range as long as the text says": scorer_of(
        lambda self, answer, entry: len(list(range(int(answer))))
    ),
    "a whole number of a decimal": scorer_of(lambda self, answer, entry: int(Decimal(answer))),
    "a while loop": scorer_of(_while),
    "an attribute that is set": scorer_of(_sets),
    "a list that all share": scorer_of(_shares),
    "a global that is set": scorer_of(_global),
}


@pytest.mark.parametrize("what", IMPURE)
def test_a_scorer_is_impure_with(what: str) -> None:
    assert not proved(IMPURE[what], Config)


def test_what_a_pure_scorer_may_do() -> None:
    def score(self: Any, answer: str, entry: Any) -> Any:
        parts = [part.strip().lower() for part in answer.split(",") if part]
        near = abs(float(parts[0]) - float(entry["answer"])) < self.config.tolerance
        return 1.0 if near and math.isclose(len(parts), 1) else sum(p == "x" for p in parts) / 2

    made = scorer_of(score)
    assert is_pure(made())
    assert made().score_answer("1.05", {"answer": "1"}) == 1.0


def test_what_is_set_on_the_data_set_itself_makes_it_impure() -> None:
    made = scorer_of(lambda self, answer, entry: self.run(answer), run=lambda self, text: 0.0)()
    assert is_pure(made)
    made.run = eval
    assert not is_pure(made)


# ---- the same scores as in the sandbox ----


@cache
def prompt_of(name: str) -> Prompt:
    return GymTask(dataset=name, train_size=2).train()[0]


BOMBS = [
    "9" * MOST_CHARACTERS, "1e999999999", "-1E+999999", "[" * MOST_CHARACTERS, "1," * (MOST_CHARACTERS // 2),
    "\n" * MOST_CHARACTERS, "9" * 4000, "A=9,B=99999999999", "0.(" + "3" * 900, "1" * 3999 + "a", "1.1" * 1333, " ," * 2000,
    "9 x " * 1000, "99999999999 days, 99999999:99", "1:" * 2000, "(0,0) " * 600, "True", "", "{}" * 2000,
]  # fmt: skip


def answers(prompt: Prompt, count: int, seed: int = 0) -> list[str]:
    """Return the right answer, and others that are like it or like nothing."""
    dice = random.Random(seed)
    right = prompt.target or str(prompt.info.get("solution", ""))
    made = [right]
    while len(made) < count:
        cut = dice.randrange(len(right) + 1)
        made += [
            right[:cut] + dice.choice("0123456789 ,\n[]xA-.") + right[cut:],
            right[:cut] + right[cut + 1 :],
            dice.choice((right.upper(), f" {right} ", f"{right}.0", f"It is {right}", right * 2)),
            "".join(dice.sample(right, len(right))),
            dice.choice(BOMBS),
        ]
    return made[:count]


def test_scores_are_those_of_the_sandbox() -> None:
    sandbox = sandboxed(*_SCORER)
    for name in PURE.split():
        prompt = prompt_of(name)
        dataset, entry = entry_of(prompt.info)
        assert is_pure(dataset)
        before = repr(entry)
        for answer in answers(prompt, COUNT):
            here = ReasoningGym()._score(prompt.info, dataset, entry, answer)
            assert here == (sandbox.score(prompt.info, answer) or 0.0), (name, answer)
        assert repr(entry) == before


def test_no_text_takes_a_pure_scorer_long() -> None:
    reward = ReasoningGym()
    for name in PURE.split():
        prompt = prompt_of(name)
        dataset, entry = entry_of(prompt.info)
        for bomb in BOMBS:
            began = time.process_time()
            reward._score(prompt.info, dataset, entry, bomb[:MOST_CHARACTERS])
            assert time.process_time() - began < 1.0, (name, bomb[:20])


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_patterns_take_linear_time(pattern: str) -> None:
    began = time.process_time()
    for piece in ("1", "1.", ",", ", ", " ", "A", "A1", "-1", "1a", "-", "_"):
        for text in (piece * (40_000 // len(piece)) + end for end in ("", "a", "\n\n")):
            for match in (re.search, re.findall, re.split, re.match):
                match(pattern, text)
    assert time.process_time() - began < 2.0


def test_a_composite_is_scored_by_the_data_set_of_the_entry() -> None:
    options = {"datasets": [{"name": "coin_flip"}, {"name": "chain_sum"}]}
    prompts = GymTask(dataset="composite", options=options, train_size=16).train()
    seen = set()
    for prompt in (prompts[index] for index in range(16)):
        assert ReasoningGym()(prompt, prompt.target).reward == 1.0
        assert ReasoningGym()(prompt, "0").reward == 0.0
        seen.add(prompt.info["reasoning_gym"]["entry"]["metadata"]["source_dataset"])
    assert seen == {"coin_flip", "chain_sum"}


def test_problems_leave_the_precision_of_decimals_alone() -> None:
    before = getcontext().prec
    GymTask(dataset="decimal_arithmetic", train_size=3).train()[2]
    assert getcontext().prec == before
