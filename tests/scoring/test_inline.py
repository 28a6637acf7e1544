"""A quick reward that is not quick on some text is interrupted, in whichever thread it runs."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from covey.rewards import Score
from covey.rewards.score import Reward
from covey.scoring import InlineScorer, Job, ScoreResult
from covey.types import Prompt

PROMPT = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="2")
LIMIT = 0.3


@dataclass(frozen=True, slots=True)
class Slow(Reward):
    """Quick, but for the texts that it is told to hang on."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        if text == "pattern":  # exponential, and never back in Python
            re.match(r"(a+)+$", "a" * 60 + "b")
        while text == "loop":
            pass
        while text == "stubborn":
            with contextlib.suppress(Exception):
                while True:
                    pass
        if text == "swallows once":
            try:
                while True:
                    pass
            except BaseException:
                while True:
                    pass
        return Score(reward=1.0, success=True)


def score(text: str) -> ScoreResult:
    started = time.monotonic()
    job = Job(prompt=PROMPT, texts=(text,), progress=1.0)
    (result,) = InlineScorer(Slow(), "slow", LIMIT).submit(job).result()
    assert time.monotonic() - started < 10 * LIMIT + 2
    return result


@pytest.mark.parametrize("text", ["loop", "pattern", "stubborn", "swallows once"])
def test_a_reward_that_hangs_in_the_main_thread_gives_no_score(text: str) -> None:
    result = score(text)
    assert result.score is None
    assert "0.3 seconds" in result.error
    assert score("fine").score == Score(reward=1.0, success=True)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["loop", "stubborn"])
def test_a_reward_that_hangs_in_another_thread_gives_no_score(text: str) -> None:
    found: list[ScoreResult] = []
    thread = threading.Thread(target=lambda: found.extend([score(text), score("fine")]))
    thread.start()
    thread.join(20)
    assert [result.score is None for result in found] == [True, False]


def test_an_alarm_of_the_users_script_is_left_alone() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert score("loop").score is None
        assert rang == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
