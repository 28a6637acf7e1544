"""Reward functions of the user: plain, async and TRL-style."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.rewards import Score, ThinkAnswer, as_reward
from covey.rewards.registry import make_reward, reward_options
from covey.rewards.score import Call
from covey.rewards.user import UserFunction, check_columns
from covey.types import Prompt
from tests.scoring import rewards

PROMPT = Prompt(
    id="p/1",
    task="t",
    messages=({"role": "user", "content": "1+1?"},),
    target="2",
    info={"level": 3},
)


def reward_of(path: str, **options: object) -> UserFunction:
    section = Named.model_validate({"name": path, **options})
    return make_reward(path, reward_options(section))


@pytest.mark.parametrize(
    ("function", "text", "reward", "success", "parts"),
    [
        (rewards.plain, "abc", 3.0, True, {}),
        (rewards.plain, "", 0.0, False, {}),
        (rewards.half_marks, "2", 1.1, True, {"length": 0.1, "right": 1.0}),
        (rewards.half_marks, "3", 0.1, False, {"length": 0.1, "right": 0.0}),
        (rewards.waits, "0.01", 0.01, False, {}),
        (rewards.trl_lengths, "abcd", 304.0, True, {}),
        (lambda prompt, text: True, "x", 1.0, True, {}),
        (lambda prompt, text: Score(reward=0.2, success=True), "x", 0.2, True, {}),
    ],
)
def test_every_kind_of_function_gives_a_score(function, text, reward, success, parts) -> None:
    score = as_reward(function)(PROMPT, text)
    assert score.reward == pytest.approx(reward)
    assert score.success is success
    assert score.parts == parts


def test_a_conversational_function_gets_messages() -> None:
    reward = as_reward(rewards.trl_async, {"conversational": True})
    assert [s.reward for s in reward.score_group(PROMPT, ["1+1?", "2"])] == [1.0, 0.0]


def test_a_group_function_can_compare_completions() -> None:
    reward = as_reward(rewards.relative)
    assert reward.whole_groups
    assert [s.reward for s in reward.score_group(PROMPT, ["ab", "abcd"])] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        (rewards.trl_lengths, "?", "returned None"),
        (lambda prompt, text: None, "x", "returned None"),
        (lambda prompt, text: "high", "x", "which is no number"),
    ],
)
def test_none_is_not_zero(function, text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        as_reward(function)(PROMPT, text)


def test_too_few_rewards_for_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="returned 1 rewards for 2 completions"):
        as_reward(rewards.too_few).score_group(PROMPT, ["a", "b"])


def test_success_starts_where_the_user_says() -> None:
    reward = reward_of("tests.scoring.rewards:plain", success_at=2.0, scale=0.5)
    assert [reward(PROMPT, t).reward for t in ("ab", "abcd")] == [1.0, 2.0]
    assert [reward(PROMPT, t).success for t in ("ab", "abcd")] == [False, True]


def test_a_class_is_made_with_its_own_options() -> None:
    reward = reward_of("tests.scoring.rewards.Counting", word="so")
    assert reward.most == 3
    assert reward(PROMPT, "so so").reward == pytest.approx(2 / 3)
    assert reward.version == 7


def test_a_reward_stays_what_it_is() -> None:
    reward = ThinkAnswer()
    assert as_reward(reward) is reward
    assert as_reward(rewards.plain).bounds == (-math.inf, math.inf)


def test_a_function_is_as_quick_as_it_says() -> None:
    def quick(prompt: Prompt, text: str) -> float:
        return 1.0

    assert as_reward(quick).quick is False
    quick.quick = True
    assert as_reward(quick).quick is True


def brevity(completion_ids, level, trainer_state, **kwargs):
    return [
        -len(ids) / n - trainer_state.global_step
        for ids, n in zip(completion_ids, level, strict=True)
    ]


def same(prompts, answer, **kwargs):
    return [float(p == "1+1?" and a == "2") for p, a in zip(prompts, answer, strict=True)]


def by_level(level, **kwargs):
    return [float(n) for n in level]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (brevity, [-1.0, -1.0 / 3]),
        (same, [1.0, 1.0]),
        (by_level, [3.0, 3.0]),
        (lambda completion_ids: [len(ids) for ids in completion_ids], [3.0, 1.0]),
        (lambda **columns: columns["level"], [3.0, 3.0]),
        (lambda text, completions: [7.0 for _ in completions], [7.0, 7.0]),
        (lambda prompt, text: prompt.info["level"] + len(text), [6.0, 4.0]),
        (lambda _, text, **more: len(text) + len(more), [3.0, 1.0]),
        (lambda prompt, completion: len(completion), [3.0, 1.0]),
    ],
)
def test_names_decide_which_kind_a_function_is(function, wanted) -> None:
    prompt = replace(PROMPT, info={"level": 3, "text": "a column"})
    call = Call(completion_ids=((1, 2, 3), (4,)), global_step=0)
    scores = as_reward(function).score_group(prompt, ["abc", "d"], call)
    assert [score.reward for score in scores] == pytest.approx(wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda question, reply: 1.0,
        lambda completion, answer: 1.0,
        lambda label, text, **columns: 1.0,
        lambda prompt, text, trainer_state: 1.0,
        lambda *given, **columns: 1.0,
        lambda prompt, text, level: 1.0,
        lambda prompt: 1.0,
        lambda: 1.0,
    ],
)
def test_a_function_of_neither_kind_is_refused(function) -> None:
    with pytest.raises(ConfigError, match=r"f\(prompt, text\).*f\(completions, \*\*columns\)"):
        as_reward(function)


def test_an_argument_that_only_trl_passes_is_refused_before_sampling() -> None:
    with pytest.raises(
        ConfigError, match=r"log_metric.*only TRL passes this argument.*log_metric=None"
    ):
        check_columns(as_reward(lambda completions, log_metric, **columns: []), PROMPT)
    check_columns(as_reward(lambda completions, log_metric=None, **columns: []), PROMPT)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("tests.scoring.rewards:plain", {"scail": 1.0}, "reward.scail is not an option.*'scale'"),
        ("tests.scoring.rewards:nothing", {}, "has no function 'nothing'"),
        ("tests.scoring.absent:plain", {}, "cannot import 'tests.scoring.absent'"),
        ("tests.scoring.rewards.Counting", {}, "reward.word must be set"),
        (
            "tests.scoring.rewards.Counting",
            {"word": "x", "much": 1},
            "reward.much is not an option",
        ),
        ("plane", {}, "reward.name = 'plane' is not a known reward"),
    ],
)
def test_mistakes_are_named(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_of(path, **options)
