from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from covey.rewards.reasoning_gym import ReasoningGym, is_harmless
from covey.types import Prompt

pytest.importorskip("reasoning_gym")
from covey.tasks.reasoning_gym import ReasoningGym as GymTask

DATASETS = ["chain_sum", "leg_counting", "countdown", "sudoku", "word_sorting", "maze"]
ODD = [
    "",
    " ",
    "\x00",
    "\ud800",
    "[",
    "{" * 3000,
    "(" * 3000,
    "1/0",
    "9**9",
    "None",
    "nan",
    "-1e999",
    "a,b\n" * 99,
    "x = 1",
    "True",
]


@pytest.fixture(scope="module", params=DATASETS)
def asked(request: pytest.FixtureRequest) -> Prompt:
    return GymTask(dataset=request.param, train_size=4).train()[0]


def solution(prompt: Prompt) -> str:
    return prompt.answer or str(prompt.info["solution"])


def test_the_answer_of_the_data_set_is_right_in_tags_or_bare(asked: Prompt) -> None:
    for text in (f"<think>hm</think><answer>{solution(asked)}</answer>", solution(asked)):
        score = ReasoningGym()(asked, text)
        assert (score.reward, score.success, score.parts) == (1.0, True, {"accuracy": 1.0})


@pytest.mark.parametrize("text", ODD, ids=[ascii(t[:12]) for t in ODD])
def test_no_text_makes_a_scorer_raise(asked: Prompt, text: str) -> None:
    score = ReasoningGym()(asked, f"<answer>{text}</answer>")
    assert 0.0 <= score.reward < 1.0
    assert not score.success


def test_thinking_does_not_count(asked: Prompt) -> None:
    assert not ReasoningGym()(asked, f"<think>{solution(asked)}</think>").success


def test_a_prompt_of_another_task_is_an_error(asked: Prompt) -> None:
    with pytest.raises(ValueError, match="reasoning_gym"):
        ReasoningGym()(dataclasses.replace(asked, info={}), "1")


def test_an_unknown_data_set_is_an_error_and_not_a_wrong_answer(asked: Prompt) -> None:
    origin = {**asked.info["reasoning_gym"], "dataset": "no such set"}
    with pytest.raises(Exception, match="no such set"):
        ReasoningGym()(dataclasses.replace(asked, info={"reasoning_gym": origin}), "1")


def prompt_of(dataset: str) -> Prompt:
    return Prompt(
        id="p",
        task="t",
        messages=({"role": "user", "content": "?"},),
        answer="",
        info={"reasoning_gym": {"dataset": dataset}},
    )


class Scorer:
    def __init__(self, score: Any) -> None:
        self.score = score

    def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
        if isinstance(self.score, Exception):
            raise self.score
        return self.score


@pytest.mark.parametrize(
    ("score", "reward"),
    [
        (0.01, 0.01),
        (1, 1.0),
        (1.5, 1.0),
        (-1, 0.0),
        (float("nan"), 0.0),
        (float("inf"), 0.0),
        (None, 0.0),
        (AttributeError("no"), 0.0),
        (RecursionError(), 0.0),
    ],
)
def test_scores_are_kept_between_0_and_1_and_a_scorer_that_breaks_gives_0(
    monkeypatch: pytest.MonkeyPatch, score: Any, reward: float
) -> None:
    entry = (Scorer(score), {"answer": "?"})
    monkeypatch.setattr("covey.tasks.reasoning_gym.entry_of", lambda info: entry)
    judged = ReasoningGym()(prompt_of("chain_sum"), "?")
    assert (judged.reward, judged.success) == (reward, reward == 1.0)


def test_a_scorer_that_finds_everything_right_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = (Scorer(1.0), {"answer": "False"})
    monkeypatch.setattr("covey.tasks.reasoning_gym.entry_of", lambda info: entry)
    asked = prompt_of("game_of_life_halting")
    assert [ReasoningGym()(asked, text).reward for text in ("False", "True", "x")] == [
        1.0,
        0.0,
        0.0,
    ]


def test_nan_is_not_near_to_every_number() -> None:
    asked = GymTask(dataset="complex_arithmetic", train_size=2).train()[0]
    assert ReasoningGym()(asked, asked.answer).reward == 1.0
    assert [ReasoningGym()(asked, text).reward for text in ("nan", "NaN+nanj", "nanj")] == [0.0] * 3


HARMFUL = [
    "__import__('os').system('true')", "open('x', 'w')", "exec('1')", "().__class__", "x.subs(1)", "[0]*999999999",
    "999999999*[0]", "'a'*99999", "9**9**9", "10**10**10", "9^9^9", "factorial(9999999)", "9999999!", "[y for y in [1]]",
    "(lambda: 1)()", "(print)('x')", "[print][0]('x')", "{1: 2}", "sum(range(9))", "sin (1).real", "9**99999",
]  # fmt: skip
HARMLESS = [
    "", "[[0, 1], [2, 3]]", "['a', 'b']", "1 2 3", "_ _ Q _\nQ _ _ _", "x**3/3 + sin(2*x) + C", "exp(-x)*cos(x)",
    "(3 + 4) * 5 - 2/7", "log(x) - 0.5*x**2", "6*x**4 - 13*x**2", "-12", "ABCDE", "exp(x)*sin(x) + exp(x)*cos(x) + C",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMFUL)
def test_an_answer_that_would_run_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert not is_harmless(text)
    entry = (Scorer(0.5), {"answer": "1"})
    monkeypatch.setattr("covey.tasks.reasoning_gym.entry_of", lambda info: entry)
    assert ReasoningGym()(prompt_of("n_queens"), text).reward == 0.0
    assert ReasoningGym()(prompt_of("chain_sum"), text).reward == 0.5


@pytest.mark.parametrize("text", HARMLESS)
def test_data_and_formulas_are_harmless(text: str) -> None:
    assert is_harmless(text)
