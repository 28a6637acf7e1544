"""What a completion gets if its prompt has no target: an error, nothing, or a neutral score."""

from __future__ import annotations

from typing import Any

import pytest

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.rewards.code import CodeTests
from covey.rewards.math_answer import MathAnswer
from covey.rewards.registry import make_reward, reward_options
from covey.rewards.score import Reward, SkippedError
from covey.rewards.text_match import ExactText, FuzzyText
from covey.rewards.think_answer import ThinkAnswer
from covey.rewards.tool_call import ToolCall
from covey.scoring import Job, score_job
from covey.types import Prompt

UNTARGETED = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="")
LEAVES: dict[str, dict[str, Any]] = {
    "math_answer": {"symbolic": False},
    "exact_text": {},
    "fuzzy_text": {},
    "tool_call": {},
    "code_tests": {"unsafe": True},
}
TARGETED = (MathAnswer, ExactText, FuzzyText, ToolCall, CodeTests, ThinkAnswer)
CLASSES = {c.__name__: c for c in TARGETED}


def made(name: str, **options: Any) -> Reward:
    section = Named.model_validate({"name": name, **LEAVES.get(name, {}), **options})
    return make_reward(name, reward_options(section))


@pytest.mark.parametrize("name", LEAVES)
def test_a_row_without_a_target_gets_what_was_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match="p"):
        made(name)(UNTARGETED, "42")
    with pytest.raises(SkippedError):
        made(name, without_target="none")(UNTARGETED, "42")
    for text in ("42", ""):
        score = made(name, without_target=0.5)(UNTARGETED, text)
        assert (score.reward, score.success) == (0.5, False)
        assert set(score.parts.values()) == {0.5}


def test_nothing_is_no_failure_and_an_error_is_one() -> None:
    job = Job(prompt=UNTARGETED, texts=("42",), progress=1.0)
    (skipped,) = score_job(made("math_answer", without_target="none"), job)
    (failed,) = score_job(made("math_answer"), job)
    assert (skipped.score, skipped.error) == (None, "")
    assert failed.score is None
    assert "has no target" in failed.error


def test_a_template_weighs_the_neutral_score_with_its_other_parts() -> None:
    # The weighted mean of all parts: 0.60 * 0.5, and the full weight of the others.
    thought = "<think>" + "We add the two numbers and check the sum once more. " + "</think>"
    mix = made("math", symbolic=False, without_target=0.5, robust=False)
    assert mix(UNTARGETED, f"{thought}42").reward == pytest.approx(0.60 * 0.5 + 0.40)
    with pytest.raises(SkippedError):
        made("agent", without_target="none")(UNTARGETED, "42")


def test_the_format_of_think_answer_counts_without_a_target() -> None:
    formed = "<think>1+1=2</think><answer>2</answer>"
    with pytest.raises(ValueError, match="'p' has no target"):
        made("think_answer")(UNTARGETED, formed)
    with pytest.raises(SkippedError):
        made("think_answer", without_target="none")(UNTARGETED, formed)
    reward = made("think_answer", without_target=0.5)
    scores = [reward(UNTARGETED, text) for text in (formed, "2")]
    assert [(s.reward, s.success) for s in scores] == [(0.55, False), (0.45, False)]  # 0.9, 0.1


@pytest.mark.parametrize("value", [1.5, -0.1, "zero"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="without_target"):
        made("exact_text", without_target=value)


@pytest.mark.parametrize("name", CLASSES)
def test_a_target_makes_the_setting_idle(name: str) -> None:
    tests = [{"stdin": "", "stdout": "5"}]
    target = "f(a=1)" if name == "ToolCall" else "5"
    prompt = Prompt(
        id="q", task="t", messages=UNTARGETED.messages, target=target, info={"tests": tests}
    )
    options = {"unsafe": True} if name in ("MathAnswer", "CodeTests") else {}
    text = "```python\nprint(6)\n```" if name == "CodeTests" else "6"
    scores = [
        CLASSES[name](**options, **more)(prompt, text) for more in ({}, {"without_target": 1.0})
    ]
    assert scores[0] == scores[1]
