"""Baselines: what needs no skill must be known before a policy finds it."""

from __future__ import annotations

from typing import Any

import pytest

from covey.baselines import Baseline, Baselines, baselines, constant_by_targets, may_probe
from covey.config import load_config
from covey.rewards.registry import make_reward, reward_options
from covey.rewards.score import Score
from covey.rewards.user import as_reward
from covey.scoring import InlineScorer
from covey.types import Prompt


def prompt(number: int, target: str) -> Prompt:
    asked = ({"role": "user", "content": f"How many letters has {number}?"},)
    return Prompt(id=str(number), task="letters", messages=asked, target=target)


# Of 16 targets, six are "1".
PROMPTS = [prompt(n, t) for n, t in enumerate(["1"] * 6 + ["2"] * 4 + list("345678"))]


def scorer(name: str, **options: Any) -> InlineScorer:
    section = load_config(None, [f"reward.name={name}"]).reward
    return InlineScorer(make_reward(name, {**reward_options(section), **options}))


@pytest.mark.parametrize("name", ["think_answer", "math_answer", "exact_text", "simple_grpo"])
def test_the_best_constant_is_found_in_the_format_that_the_reward_wants(name: str) -> None:
    found = baselines(PROMPTS, scorer(name))
    assert found.constant is not None
    assert (found.constant.answer, found.constant.success) == ("1", 6 / 16)
    assert found.empty is not None
    assert found.empty.success == 0.0
    assert found.flagged() == ["always answering '1' is correct on 37.5% of the prompts"]


def test_a_reward_that_reads_the_prompt_or_nothing_is_seen_through() -> None:
    def echoes(asked: Prompt, text: str) -> Score:
        return Score(reward=float(text == asked.text), success=text == asked.text)

    def lenient(asked: Prompt, text: str) -> Score:
        return Score(reward=1.0 - len(text) / 1e4, success=not text)

    copied = baselines(PROMPTS, InlineScorer(as_reward(echoes)))
    assert copied.copy == Baseline(success=1.0, reward=1.0, prompts=16)
    nothing = baselines(PROMPTS, InlineScorer(as_reward(lenient)))
    assert nothing.empty == Baseline(success=1.0, reward=1.0, prompts=16)
    assert nothing.flagged() == ["an empty completion is correct on 100.0% of the prompts"]


def test_slow_rewards_score_few_prompts_and_count_targets() -> None:
    calls = []

    def counted(asked: Prompt, text: str) -> float:
        calls.append(text)
        return 0.0

    found = baselines(PROMPTS, InlineScorer(as_reward(counted)), most=4)
    assert found.constant == Baseline(success=6 / 16, answer="1", prompts=16)
    assert len(calls) == 8
    assert found.row()["constant"] == {"success": 0.375, "answer": "1", "prompts": 16}


def test_texts_and_programs_have_no_constant() -> None:
    assert constant_by_targets([prompt(0, "a long text " * 9)]) is None
    assert baselines([prompt(0, "")], scorer("think_answer")).constant is None
    assert Baselines().flagged() == []


def test_a_few_equal_targets_may_be_chance() -> None:
    assert baselines(PROMPTS[:4], scorer("think_answer")).flagged() == []


class OwnReward:
    """A user's class. Its call may cost money, even if it says that it is quick."""

    quick, version, bounds = True, 1, (0.0, 1.0)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        raise AssertionError("called for a baseline")


def test_user_code_and_judges_are_not_called_for_it() -> None:
    assert may_probe(scorer("think_answer").reward)
    assert not may_probe(as_reward(lambda prompt, text: 0.0))
    assert not may_probe(OwnReward())
    assert may_probe(scorer("math").reward)
