"""COVEY_EXAMPLES=200 compares as many answers of each data set; the usual run compares fewer."""

from __future__ import annotations

import os
import random
import time
from decimal import getcontext
from functools import cache
from importlib import metadata

import pytest

pytest.importorskip("reasoning_gym")
from reasoning_gym.composite import CompositeDataset
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from covey.rewards import gym_scorer
from covey.rewards.reasoning_gym import (
    _SCORER,
    MOST_CHARACTERS,
    REVIEWED,
    ReasoningGym,
    installed_version,
    runs_here,
)
from covey.sandbox.scorer import sandboxed
from covey.tasks.reasoning_gym import ReasoningGym as GymTask
from covey.tasks.reasoning_gym import entry_of
from covey.types import Prompt

COUNT = int(os.environ.get("COVEY_EXAMPLES", "2"))


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some data sets ask for one, because they differ from process to process without."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_which_scorers_run_outside_the_sandbox() -> None:
    here = {name for name, (dataset, _) in DATASETS.items() if runs_here(name, dataset)}
    common = {
        n for n, (s, _) in DATASETS.items() if s.score_answer is ProceduralDataset.score_answer
    }
    assert here == REVIEWED | common
    assert {"basic_arithmetic", "gcd", "letter_counting"} <= common
    assert here.isdisjoint((*gym_scorer.EVALUATING, "bitwise_arithmetic", "number_sorting"))
    assert not runs_here("composite", CompositeDataset)


def test_in_another_version_only_the_default_comparison_runs_outside_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed_version.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9")
    assert not runs_here("sudoku", DATASETS["sudoku"][0])
    assert runs_here("gcd", DATASETS["gcd"][0])
    installed_version.cache_clear()


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
    for name in sorted(REVIEWED):
        prompt = prompt_of(name)
        dataset, entry = entry_of(prompt.info)
        assert runs_here(name, type(dataset))
        before = repr(entry)
        for answer in answers(prompt, COUNT):
            here = ReasoningGym()._score(prompt.info, name, dataset, entry, answer)
            assert here == (sandbox.score(prompt.info, answer) or 0.0), (name, answer)
        assert repr(entry) == before


def test_no_text_takes_a_pure_scorer_long() -> None:
    reward = ReasoningGym()
    for name in sorted(REVIEWED):
        prompt = prompt_of(name)
        dataset, entry = entry_of(prompt.info)
        for bomb in BOMBS:
            began = time.process_time()
            reward._score(prompt.info, name, dataset, entry, bomb[:MOST_CHARACTERS])
            assert time.process_time() - began < 1.0, (name, bomb[:20])


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
