"""Composite rewards: weights, the gate, the schedule, and the robust factor."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import Named
from covey.errors import ConfigError
from covey.rewards import Score
from covey.rewards.coherence import robust_factor
from covey.rewards.mix import ByTask, Mix
from covey.rewards.registry import REWARDS, check_alone, make_reward, reward_options
from covey.sandbox.scorer import LONGEST
from covey.types import Prompt

PROMPT = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="78.54")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Returns a fixed score."""

    reward: float
    success: bool = True
    bounds: tuple[float, float] = (0.0, 1.0)
    quick: bool = True
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return Score(reward=self.reward, success=self.success, parts={"a": 0.25, "b": 0.75})


def mix(**changes: Any) -> Mix:
    usual: dict[str, Any] = {
        "parts": {
            "accuracy": Fixed(reward=0.8),
            "format": Fixed(reward=0.5),
            "safety": Fixed(reward=1.0),
        },
        "weights": {"accuracy": 0.6, "format": 0.3, "safety": 0.1},
    }
    return Mix(**{**usual, **changes})


def built(name: str, **options: Any) -> Any:
    section = Named.model_validate({"name": name, **options})
    return make_reward(name, reward_options(section))


def test_the_reward_is_the_weighted_mean_and_parts_are_logged_unweighted() -> None:
    score = mix()(PROMPT, "x")
    assert score.reward == pytest.approx(0.6 * 0.8 + 0.3 * 0.5 + 0.1 * 1.0)
    assert score.success is True
    assert score.parts == {
        "accuracy": 0.8, "format": 0.5, "safety": 1.0,
        **{f"{part}/{inner}": value for part in ("accuracy", "format", "safety") for inner, value in (("a", 0.25), ("b", 0.75))},
    }  # fmt: skip


@pytest.mark.parametrize("gated", [True, False])
def test_accuracy_counts_only_where_the_format_holds(gated: bool) -> None:
    parts = {"accuracy": Fixed(reward=1.0), "format": Fixed(reward=0.5, success=False)}
    score = mix(parts=parts, weights={"accuracy": 0.7, "format": 0.3}, gated=gated)(PROMPT, "x")
    assert score.reward == pytest.approx(0.15 if gated else 0.85)
    assert score.success is not gated
    assert score.parts["accuracy"] == 1.0, "what is logged is not gated"


def test_a_closed_gate_costs_as_much_as_being_wrong() -> None:
    bounds = (-1.0, 1.0)
    parts = {
        "accuracy": Fixed(reward=1.0, bounds=bounds),
        "format": Fixed(reward=0.0, success=False),
    }
    score = mix(parts=parts, weights={"accuracy": 0.5, "format": 0.5})(PROMPT, "x")
    assert score.reward == -0.5


BOUNDLESS = (-math.inf, math.inf)


@pytest.mark.parametrize(("given", "least"), [(2.0, 0.0), (-1.0, -1.0)])
def test_a_part_without_bounds_counts_from_0(given: float, least: float) -> None:
    parts = {"accuracy": Fixed(reward=given, bounds=BOUNDLESS), "format": Fixed(reward=0.5)}
    closed = {**parts, "format": Fixed(reward=0.0, success=False)}
    weights = {"accuracy": 0.5, "format": 0.5}
    assert mix(parts=parts, weights=weights)(PROMPT, "x").reward == 0.5 * given + 0.25
    assert mix(parts=closed, weights=weights)(PROMPT, "x").reward == 0.5 * least
    padded = mix(parts=parts, weights=weights, robust=True)(PROMPT, "so it is right. " * 40)
    total = 0.5 * given + 0.25
    assert padded.parts["robust"] == 0.5
    assert padded.reward == (total / 2 if total > 0 else total)


def test_a_part_without_weight_leaves_the_bounds_alone() -> None:
    parts = {"accuracy": Fixed(reward=1.0), "style": Fixed(reward=5.0, bounds=BOUNDLESS)}
    made = mix(parts=parts, weights={"accuracy": 1.0, "style": 0.0})
    assert made.bounds == (0.0, 1.0)
    assert made(PROMPT, "x").reward == 1.0


def test_without_a_part_called_format_there_is_no_gate() -> None:
    parts = {"accuracy": Fixed(reward=1.0), "style": Fixed(reward=0.0, success=False)}
    assert mix(parts=parts, weights={"accuracy": 0.5, "style": 0.5})(PROMPT, "x").success


def test_early_weights_change_in_a_straight_line() -> None:
    early = {"accuracy": 0.2, "format": 0.7, "safety": 0.1}
    scheduled = mix(early=early, early_until=0.2)
    for share, expected in [
        (0.0, 0.7),
        (0.05, 0.6),
        (0.1, 0.5),
        (0.2, 0.3),
        (0.7, 0.3),
        (1.0, 0.3),
    ]:
        weights = scheduled.at(share).weights
        assert weights["format"] == pytest.approx(expected)
        assert sum(weights.values()) == pytest.approx(1.0)
    assert mix().at(0.0) == mix()
    first = scheduled.at(0.0)(PROMPT, "x").reward
    assert first == pytest.approx(0.2 * 0.8 + 0.7 * 0.5 + 0.1)


def test_a_mix_within_a_mix_follows_its_own_schedule() -> None:
    inner = mix(early={"accuracy": 0.2, "format": 0.7, "safety": 0.1})
    parts = {"accuracy": inner, "style": Fixed(reward=0.0)}
    outer = mix(parts=parts, weights={"accuracy": 0.5, "style": 0.5})
    for share in (0.0, 0.1, 1.0):
        within = inner.at(share)(PROMPT, "x").reward
        assert outer.at(share)(PROMPT, "x").reward == pytest.approx(0.5 * within)


@given(
    rewards=st.lists(st.floats(-2, 3), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    holds=st.booleans(),
    robust=st.booleans(),
    share=st.floats(0, 1),
    text=st.sampled_from(["fine words", "<think>zxqv zxqv kjq</think>" * 30, "a " * 2000]),
)
def test_a_mix_never_leaves_its_bounds(rewards, weights, holds, robust, share, text) -> None:
    names = ("accuracy", "format", "safety")
    total = sum(weights)
    made = mix(
        parts={
            n: Fixed(reward=r, success=holds, bounds=(-2.0, 3.0))
            for n, r in zip(names, rewards, strict=True)
        },
        weights={n: w / total for n, w in zip(names, weights, strict=True)},
        early={n: w / total for n, w in zip(names, reversed(weights), strict=True)},
        robust=robust,
    )
    low, high = made.bounds
    assert low - 1e-9 <= made.at(share)(PROMPT, text).reward <= high + 1e-9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": {"accuracy": 0.6, "format": 0.3, "safety": 0.2}},
            r"must sum to 1, not 1.1 \(accuracy 0.6",
        ),
        ({"weights": {"accuracy": 1.2, "format": -0.3, "safety": 0.1}}, "must not be negative"),
        ({"weights": {"accuracy": 0.6, "format": 0.4}}, "differ in safety"),
        ({"early": {"accuracy": 1.0}}, "early and parts must have the same names"),
        ({"early_until": 0.0}, "early_until = 0.0"),
        (
            {"parts": {"right": Fixed(reward=1.0)}, "weights": {"right": 1.0}},
            "must be called 'accuracy'",
        ),
        ({"parts": {}, "weights": {}}, "there are no parts"),
    ],
)
def test_invalid_mixes_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix(**changes)


HONEST = "<think>The circle has radius 5, so its area is pi times 25.</think> 78.54"


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        (HONEST, 1.0),
        (
            "<think>sdkfj wqeoiruzx qpwoeiru zmxncbv qwpeoriu alskdjfh zmxncb wqpoeiru</think> 78.54",
            0.5,
        ),
        (" ".join(f"word{n}" for n in range(1001)), 0.7),
        ("".join(f"<tool_call>f{n}({n * n})</tool_call> then {n**3} " for n in range(10)), 0.9),
        ("".join(f"<tool_call>f{n}({n * n})</tool_call> then {n**3} " for n in range(30)), 0.5),
        ("so it is right. " * 40, 0.5),
        ("", 1.0),
    ],
)
def test_the_factors_against_gaming(text: str, factor: float) -> None:
    assert robust_factor(text) == pytest.approx(factor)


def test_robust_multiplies_what_lies_above_the_least_reward() -> None:
    padded = "so it is right. " * 40
    plain, robust = mix()(PROMPT, padded), mix(robust=True)(PROMPT, padded)
    assert robust.reward == pytest.approx(plain.reward / 2)
    assert robust.parts["robust"] == 0.5
    assert robust.success


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("math", {"accuracy": 0.60, "format": 0.15, "efficiency": 0.15, "safety": 0.10}),
        ("code", {"accuracy": 0.50, "format": 0.10, "efficiency": 0.25, "safety": 0.15}),
        ("retrieval", {"accuracy": 0.40, "format": 0.20, "efficiency": 0.20, "safety": 0.20}),
        ("agent", {"accuracy": 0.50, "format": 0.20, "efficiency": 0.15, "safety": 0.15}),
    ],
)
def test_templates_have_the_published_weights(name: str, weights: dict[str, float]) -> None:
    made = built(name, **({"unsafe": True} if name == "code" else {}))
    assert made.weights == weights
    assert made.bounds == (0.0, 1.0)
    assert made.robust


def test_the_published_example_is_worth_full_reward() -> None:
    """The source text expects 0.93; its own code gives 0.46, because it reads the 2 of 5**2."""
    text = (
        "<think>\nNeed to compute circle area: S = π × r² = π × 5² ≈ 78.54\n</think>\n"  # noqa: RUF001
        "<tool_call>calculator(expression='3.14159 * 5**2')</tool_call>"
    )
    score = built("math")(PROMPT, text)
    assert {k: v for k, v in score.parts.items() if "/" not in k} == {
        "accuracy": 1.0, "format": 1.0, "efficiency": 1.0, "safety": 1.0, "robust": 1.0,
    }  # fmt: skip
    assert score.reward == pytest.approx(1.0)
    assert score.success


def test_a_template_may_weigh_the_format_more_at_first() -> None:
    made = built("math", early_format=0.4)
    assert made.at(0.0).weights == pytest.approx(
        {"accuracy": 0.35, "format": 0.4, "efficiency": 0.15, "safety": 0.1}
    )
    assert made.at(0.2).weights == pytest.approx(dict(made.weights))


PARTS = {
    "accuracy": {"name": "math_answer", "weight": 0.7, "tolerance": 0.001},
    "format": {"name": "think_answer_form", "weight": 0.3, "graded": True},
}


def test_a_mix_is_made_from_plain_data() -> None:
    made = built("mix", parts=PARTS, robust=True)
    assert made.parts["accuracy"].tolerance == 0.001
    assert made.parts["format"].graded
    assert made.weights == {"accuracy": 0.7, "format": 0.3}
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_mix_may_hold_a_function_of_the_user() -> None:
    parts = {"accuracy": {"name": "tests.scoring.rewards:plain", "weight": 1, "scale": 0.5}}
    assert built("mix", parts=parts)(PROMPT, "abcd").reward == 2.0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"accuracy": {"name": "math_anser", "weight": 1.0}},
            "reward.parts.accuracy.name = 'math_anser'.*'math_answer'",
        ),
        (
            {"accuracy": {"name": "math_answer"}},
            "reward.parts.accuracy.weight must be a number, not None",
        ),
        ({"accuracy": {"name": "math_answer", "weight": "much"}}, "not 'much'"),
        ({"accuracy": {"weight": 1.0}}, "reward.parts.accuracy.name must be set"),
        (
            {"accuracy": {"name": "math_answer", "weight": 1.0, "tolerant": 1}},
            "reward.parts.accuracy.tolerant.*'tolerance'",
        ),
        (
            {"accuracy": {"name": "math_answer", "weight": 1.0, "tolerance": "x"}},
            "reward.parts.accuracy.tolerance = 'x'",
        ),
    ],
)
def test_mistakes_in_parts_are_named_by_their_path(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built("mix", parts=parts)


JUDGE = {"name": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": ""}
TABLE = {k: v for k, v in JUDGE.items() if k != "name"}


def test_a_judge_never_decides_alone() -> None:
    alone = built(**JUDGE)
    with pytest.raises(ConfigError, match="cannot be the only reward"):
        check_alone("judge", alone)
    with pytest.raises(ConfigError, match="never decides alone"):
        built("mix", parts={"accuracy": {**JUDGE, "weight": 1.0}})
    with pytest.raises(ConfigError, match=r"at most half of the weight, not 0\.6"):
        built(
            "mix",
            parts={
                "accuracy": {"name": "exact_text", "weight": 0.4},
                "judge": {**JUDGE, "weight": 0.6},
            },
        )
    mixed = built(
        "mix",
        parts={
            "accuracy": {"name": "exact_text", "weight": 0.5},
            "judge": {**JUDGE, "weight": 0.5},
        },
    )
    assert check_alone("mix", mixed) is mixed
    made = built("retrieval", judge=TABLE)
    assert made.weights == {
        "accuracy": 0.2,
        "format": 0.2,
        "efficiency": 0.2,
        "safety": 0.2,
        "judge": 0.2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "m"}, r"^config: reward\.judge\.modle is not an option of judge.*'model'"),
        ({**TABLE, "scale": "ten"}, r"^config: reward\.judge\.scale = 'ten'"),
        ({"base_url": TABLE["base_url"]}, r"^config: reward\.judge\.model must be set"),
    ],
)
def test_errors_in_the_table_of_a_judge_name_the_option(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built("retrieval", judge=options)


def test_each_task_has_its_own_reward() -> None:
    made = built("by_task", tasks={"t": {"name": "exact_text"}, "u": {"name": "lm_book"}})
    assert isinstance(made, ByTask)
    assert made.bounds == (0.0, 2.8)
    assert made(PROMPT, "78.54").reward == 1.0
    assert made(replace(PROMPT, task="u"), "<answer>78.54</answer>").reward == pytest.approx(2.4)
    with pytest.raises(ValueError, match="no reward for task 'v'"):
        made(replace(PROMPT, task="v"), "78.54")


def test_a_mix_takes_as_long_as_its_parts_and_by_task_as_the_slowest() -> None:
    programs = {"name": "code_tests", "unsafe": True, "total_seconds": 9.0}
    parts = {
        "accuracy": {**programs, "weight": 0.5},
        "judge": {**JUDGE, "total_seconds": 25.0, "weight": 0.5},
    }
    assert built("mix", parts=parts).max_seconds == 10.0 + 25.0
    tasks = {"t": programs, "u": {"name": "mix", "parts": parts}, "v": {"name": "lm_book"}}
    assert built("by_task", tasks=tasks).max_seconds == 35.0
    assert built("math").max_seconds == LONGEST
    assert built("math", symbolic=False).max_seconds == 0.0


def test_by_task_follows_the_schedule_of_each() -> None:
    made = built(
        "by_task", tasks={"t": {"name": "math", "early_format": 0.4}, "u": {"name": "lm_book"}}
    )
    assert made.at(0.0).tasks["t"].weights["format"] == 0.4
    assert made.at(0.0).tasks["u"] == made.tasks["u"]


def test_every_reward_has_what_a_reward_needs() -> None:
    given = {
        "mix": {"parts": PARTS}, "by_task": {"tasks": {"t": {"name": "lm_book"}}},
        "judge": TABLE,
        "code": {"unsafe": True}, "code_tests": {"unsafe": True},
    }  # fmt: skip
    for name in REWARDS.keys() - {"sum"}:  # it is made of the user's own functions
        reward = built(name, **given.get(name, {}))
        low, high = reward.bounds
        assert low < high, name
        assert isinstance(reward.quick, bool), name
        assert reward.version >= 1, name
        assert pickle.loads(pickle.dumps(reward)) == reward, name
