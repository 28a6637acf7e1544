"""Every task passes the lab with its reward; published rewards fail on their known hacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.lab.rewards.checks import (
    Check,
    Lab,
    check_bounds,
    check_correct,
    check_determinism,
    check_hacks,
    check_order,
)
from covey.rewards import Reward
from covey.rewards.code import CodeTests
from covey.rewards.mix import Mix
from covey.rewards.registry import gamed_by, make_reward, reward_options
from covey.sandbox import require_isolation
from covey.scoring import Pool
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.code import Code
from covey.tasks.countdown import Countdown
from covey.tasks.gsm8k import Gsm8k
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.rows import Jsonl
from covey.tasks.tools import Tools
from covey.types import Prompt
from tests.processes import FORKED_WORKERS


def reward_of(name: str, **options: Any) -> Reward:
    section = Named.model_validate({"name": name, **options})
    return make_reward(name, reward_options(section))


def formed(accuracy: str) -> Reward:
    """Return a mix of accuracy and format."""
    parts = {
        "accuracy": {"name": accuracy, "weight": 0.9},
        "format": {"name": "think_answer_form", "weight": 0.1},
    }
    return reward_of("mix", parts=parts, robust=True)


# One worker: each takes seconds to import math-verify or reasoning-gym.
@contextmanager
def lab_of(reward: Reward, timeout: float = 20.0, workers: int = 1) -> Iterator[Lab]:
    """A lab whose first process is a fork; the one that scores again has its own hash seed."""
    pool = Pool(reward, "r", workers=workers, timeout=timeout)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("covey.subprocesses.subprocess", FORKED_WORKERS)
            pool.start()
        yield Lab(reward=reward, scorer=pool)
    finally:
        pool.close()


def faults_of(lab: Lab, prompts: Sequence[Prompt], hacked: int = 1) -> list[Check]:
    """Score right completions and hacks of a task, and return the checks that fail."""
    solution, form = check_correct(lab, prompts)
    checks = [solution, *check_hacks(lab, prompts[:hacked], form)]
    checks.append(check_order(lab, prompts[:hacked], form))
    assert len(checks) > 28
    return [check for check in checks if not check.passed]


def faults_in_all(lab: Lab) -> list[Check]:
    """Check everything that was scored, also once more in another process."""
    assert [result.error for result in lab.seen.values() if result.score is None] == []
    return [check for check in (check_bounds(lab), check_determinism(lab)) if not check.passed]


def faults(
    reward: Reward, prompts: Sequence[Prompt], hacked: int = 1, workers: int = 1
) -> list[Check]:
    """Run every check but the throughput, and return those that fail."""
    with lab_of(reward, workers=workers) as lab:
        return faults_of(lab, prompts, hacked) + faults_in_all(lab)


def hacks_that_work(reward: Reward, prompts: Sequence[Prompt]) -> tuple[str, set[str]]:
    with lab_of(reward) as lab:
        solution, form = check_correct(lab, prompts)
        checks = check_hacks(lab, prompts, form)
    assert solution.passed
    return form.name, {c.name.removeprefix("hack: ") for c in checks if not c.passed}


def written(path: Path, rows: Sequence[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


WORD_PROBLEMS = [
    {
        "question": "Ann has 3 boxes of 12 eggs and breaks 5. How many are left?",
        "answer": "There are 3*12=<<3*12=36>>36 eggs.\nSo 36-5=<<36-5=31>>31 are left.\n#### 31",
    },
    {
        "question": "A bike costs $1,250 and a helmet $50. What do they cost together?",
        "answer": "Together 1250+50=<<1250+50=1300>>1300 dollars.\n#### 1,300",
    },
    {
        "question": "Five friends share 12 liters of juice. How much has each?",
        "answer": "Each has 12/5=<<12/5=2.4>>2.4 liters.\n#### 2.4",
    },
    {
        "question": "It is 4 degrees and gets 9 degrees colder. What is the temperature then?",
        "answer": "4-9=<<4-9=-5>>-5, that is 5 below zero.\n#### -5",
    },
]
FORMULAS = [
    {"question": "Simplify (x + 1) / 2 + 1.", "answer": r"\frac{x+3}{2}"},
    {"question": "Which numbers solve x^2 - 5x + 6 = 0?", "answer": r"\{2, 3\}"},
    {"question": "What line passes through (0, 1) with slope 2?", "answer": "y = 2x + 1"},
    {"question": "How long is the diagonal of a square with side 3?", "answer": r"3\sqrt{2}"},
    {"question": "For which x is x^2 below 4?", "answer": "(-2, 2)"},
    {"question": "Expand (a - b)^2.", "answer": "a^2 - 2ab + b^2"},
]


def test_arithmetic() -> None:
    assert faults(reward_of("think_answer"), Arithmetic().held_out()[:4]) == []


def test_sums_word_problems_and_formulas(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("math_verify")
    problems = written(tmp_path / "problems.jsonl", WORD_PROBLEMS)
    formulas = written(tmp_path / "formulas.jsonl", FORMULAS)
    with lab_of(reward_of("math")) as lab:
        assert faults_of(lab, Arithmetic().held_out()[:4], hacked=2) == []
        request.getfixturevalue("without_walls")
        task = Gsm8k(train_file=problems, held_out_file=problems)
        assert faults_of(lab, task.held_out(), hacked=2) == []
        task = Jsonl(train_file=formulas, held_out_file=formulas)
        assert faults_of(lab, task.held_out(), hacked=3) == []
        assert faults_in_all(lab) == []


def test_countdown() -> None:
    assert faults(formed("countdown"), Countdown().held_out()[:4]) == []


def test_tools() -> None:
    assert faults(reward_of("agent"), Tools().held_out()[:6]) == []


@pytest.mark.usefixtures("without_walls")
def test_code() -> None:
    try:
        require_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    reward = reward_of("code")
    assert isinstance(reward, Mix)
    # Shorter limits, because the hacks include endless loops.
    hasty = CodeTests(seconds=1.0, total_seconds=1.0)
    reward = replace(reward, parts={**reward.parts, "accuracy": hasty})
    # Two workers: they wait for those loops.
    assert faults(reward, Code().held_out()[:3], hacked=1, workers=2) == []


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym(dataset="chain_sum", train_size=4, held_out_size=4)
    assert faults(formed("reasoning_gym"), task.held_out()[:4]) == []


TEXTS = [
    {"question": "What is the capital of France?", "answer": "It is the city of Paris"},
    {"question": "Who wrote Faust?", "answer": "Johann Wolfgang von Goethe wrote it"},
    {
        "question": "Why is the sky blue?",
        "answer": "Molecules of the air scatter blue light more than red light",
    },
]


@pytest.mark.usefixtures("without_walls")
def test_texts(tmp_path: Path) -> None:
    file = written(tmp_path / "texts.jsonl", TEXTS)
    prompts = Jsonl(train_file=file, held_out_file=file).held_out()
    assert faults(reward_of("retrieval"), prompts, hacked=2) == []


@pytest.mark.parametrize(
    ("name", "form", "count"),
    [
        ("lm_book", "reasoning_answer", 9),
        ("simple_grpo", "think_answer", 10),
        ("open_instruct", "think_answer", 11),
        ("nano_aha", "prefilled", 6),
        ("grpo_zero", "prefilled", 6),
    ],
)
def test_each_published_reward_lists_the_hacks_that_work(name: str, form: str, count: int) -> None:
    task = Countdown() if name in ("nano_aha", "grpo_zero") else Arithmetic()
    reward = reward_of(name)
    known = gamed_by(reward)
    assert len(known) == count
    assert hacks_that_work(reward, task.held_out()[:4]) == (form, set(known))
