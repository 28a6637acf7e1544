"""The templates: correct completions score highest, and empty ones lowest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.recipes.agent_book import rewards as templates
from covey.rewards.mix import Mix
from covey.rewards.score import Score
from covey.sandbox import require_isolation
from covey.types import Prompt

LONG = (
    "I go through the question one step at a time, note what is given and what is asked, and check "
    "each of the steps again before I write down the answer."
)
NOISE = "zxcv kjhg qwpt bnmd xzvc gfdk trwq pmnb vbnz kljh"
LINKS = "https://a.example/x https://b.example/y"
THINKING = ("", "ok", LONG, NOISE, "so it is. " * 200, LONG * 12)
AROUND = ("{}", "<answer>{}</answer>", "<answer>{}</answer>\n" + LINKS, "{}\nrm -rf / && sudo rm")


def prompt(answer: str, **info: Any) -> Prompt:
    message = {"role": "user", "content": "?"}
    return Prompt(id="p", task="t", messages=(message,), target=answer, info=info)


CALL = {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}
TEXT = "It is the city of Paris in France"
ASKED = {
    "math": prompt("42"),
    "agent": prompt("", call=CALL),
    "retrieval": prompt(TEXT),
}
ANSWERS = {
    "math": ["42", r"\boxed{42}", "41", r"\boxed{43}", "41=42", "I cannot say.", NOISE, ""],
    "agent": [
        "<tool_call>get_weather(city='Rome', days=3)</tool_call>",
        "<tool_call>get_weather(city='Oslo', days=3)</tool_call>",
        "<tool_call>get_time(city='Rome')</tool_call>",
        "get_weather(city='Rome', days=3)",
        "Rome",
        NOISE,
        "",
    ],
    "retrieval": [TEXT, f"{TEXT}.", "It is the city of Paris", "London", f"{NOISE} {LINKS}", ""],
}


def made(name: str, early_format: float = 0.0) -> Mix:
    build = {"math": templates.math, "agent": templates.agent, "retrieval": templates.retrieval}
    return build[name](early_format=early_format).at(0.0)


def completions(name: str) -> Iterator[str]:
    for thinking, around, answer in itertools.product(THINKING, AROUND, ANSWERS[name]):
        said = around.format(answer)
        yield f"<think>{thinking}</think>\n{said}"
        yield f"<think>{thinking}\n{said}"
        yield said
        yield f"{said}\n{thinking}"


@pytest.mark.parametrize("early", [0.0, 0.4])
@pytest.mark.parametrize("name", ASKED)
def test_a_correct_completion_has_more_than_any_incorrect_one(name: str, early: float) -> None:
    mix = made(name, early)
    asked, judged = ASKED[name], mix.parts["accuracy"]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for text in completions(name):
        rewards[judged(asked, text).success].append(mix(asked, text).reward)
    assert len(rewards[True]) > 40
    assert len(rewards[False]) > 150
    assert min(rewards[True]) >= 0.5 > max(rewards[False])
    assert min(rewards[False]) == 0.0
    assert max(rewards[True]) == 1.0


NOTHING = [
    "",
    " \n",
    NOISE,
    f"{NOISE}\n{LINKS}",
    LINKS,
    f"<think>{LONG}</think>",
    f"<think>{LONG}",
    f"<think>{NOISE}</think>{NOISE}",
    f"<think>{LONG}</think>\n{NOISE}",
    f"<think>{NOISE}</think>\n<answer>{NOISE}</answer>\n{LINKS}",
]


@pytest.mark.parametrize("text", NOTHING)
@pytest.mark.parametrize("name", ASKED)
def test_silence_and_gibberish_have_the_least(name: str, text: str) -> None:
    assert made(name)(ASKED[name], text).reward == 0.0


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        # half of the range for a wrong answer; the format has 0.15 / (0.60 + 0.15) of it
        ("math", f"<think>{LONG}</think>41", 0.5 * 0.15 / 0.75),
        ("math", f"<think>{LONG}</think>42", 1.0),
        # thinking that is too short closes the gate: format 0.8
        ("math", "<think>ok</think>42", 0.5 + 0.5 * 0.15 * 0.8),
        ("math", "42", 0.5),
        # the correct tool scores half
        (
            "agent",
            f"<think>{LONG}</think><tool_call>get_weather(city='Oslo')</tool_call>",
            0.5 * (0.5 * 0.5 + 0.2) / 0.7,
        ),
        ("retrieval", TEXT, 0.5 + 0.5 * 0.8),
        ("retrieval", f"<answer>{TEXT}</answer>\n{LINKS}", 1.0),
    ],
)
def test_the_halves(name: str, text: str, reward: float) -> None:
    assert made(name)(ASKED[name], text).reward == pytest.approx(reward)


PROGRAMS = ["def f(x):\n    return x + 1", "def f(x):\n    return 2", "def f(x): retrun", NOISE, ""]


def test_programs_that_pass_have_more_than_others() -> None:
    try:
        require_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    tests = [{"call": "f(1)", "expected": "2"}, {"call": "f(2)", "expected": "3"}]
    asked, mix = prompt("", tests=tests), templates.code()
    scores = {
        (program, thinking): mix(asked, f"{thinking}```python\n{program}\n```")
        for program in PROGRAMS
        for thinking in (f"<think>{LONG}</think>\n", "")
    }
    best = PROGRAMS[0]
    right = [score.reward for key, score in scores.items() if key[0] == best]
    wrong = [score.reward for key, score in scores.items() if key[0] != best]
    assert (min(right), max(right)) == (0.5, 1.0)
    assert max(wrong) == pytest.approx(0.5 * (0.5 * 0.5 + 0.1) / 0.6)
    assert sum(reward > 0 for reward in wrong) == 2, "one passes half, and others do not run"


def test_bounds_are_needed() -> None:
    class Boundless:
        quick, version = True, 1
        bounds = (float("-inf"), float("inf"))

        def __call__(self, prompt: Prompt, text: str) -> Score:
            return Score(reward=1.0, success=True)

    with pytest.raises(ConfigError, match="correct_first needs parts with bounds"):
        Mix(parts={"accuracy": Boundless()}, weights={"accuracy": 1.0}, correct_first=True)


NO_TARGET = {
    "math": (prompt(""), "42"),
    "agent": (prompt(""), '<tool_call>{"name": "look", "arguments": {}}</tool_call>'),
    "retrieval": (prompt(""), TEXT + " " + LINKS),
    "code": (prompt(""), "```python\nprint(1)\n```"),
}


@pytest.mark.parametrize("name", NO_TARGET)
def test_without_a_target_every_other_part_counts(name: str) -> None:
    try:
        reward = getattr(templates, name)(without_target=0.5)
    except ConfigError as error:
        pytest.skip(str(error))
    asked, answer = NO_TARGET[name]

    def score(answer: str) -> Score:
        return reward(asked, f"<think>{LONG}</think>\n<answer>{answer}</answer>")

    clean = score(answer)
    unsafe = score(answer + "\nrm -rf / && sudo rm -rf /home")
    slow = score(answer + " so it is, and this is said at length" * 200)
    assert clean.parts["accuracy"] == unsafe.parts["accuracy"] == 0.5
    assert not clean.success
    assert unsafe.parts["safety"] < clean.parts["safety"]
    assert unsafe.reward < clean.reward - 0.05
    assert slow.reward < clean.reward - 0.05


def test_the_neutral_reward_is_the_weighted_mean_of_all_parts() -> None:
    text = f"<think>{LONG}</think>\n<answer>42</answer>"
    reward = templates.math(without_target=0.5)
    assert reward(prompt(""), text).reward == pytest.approx(0.6 * 0.5 + 0.15 + 0.15 + 0.10)
    danger = reward(prompt(""), text.replace("42", "42 rm -rf /"))
    lost = 1 - danger.parts["safety"]
    assert danger.reward == pytest.approx(0.7 - 0.10 * lost)
