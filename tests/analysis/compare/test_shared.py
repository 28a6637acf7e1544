from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.analysis.compare.shared import SharedEngine
from covey.config import load_config
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Question, Sampling
from covey.evaluate.evaluate import EVALUATION_STEP
from covey.models.language_model import LanguageModel
from covey.rollout.collect import ask
from covey.tasks.arithmetic import Arithmetic
from covey.training.build import policy_of
from covey.training.policy import Policy
from covey.types import Rollout

SAMPLING = Sampling(samples=3, max_tokens=12, seed=4)


class Counting:
    """A sampler that counts how often it is asked."""

    def __init__(self, model: LanguageModel) -> None:
        self.sampler = NativeEngine(model)
        self.calls = 0

    def generate(
        self,
        questions: Sequence[Question],
        *,
        step: int,
        sampling: Sampling,
        version: int = 0,
        finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        self.calls += 1
        return self.sampler.generate(
            questions, step=step, sampling=sampling, version=version, finished=finished
        )


@pytest.fixture
def policy(embedded: LanguageModel) -> Policy:
    return policy_of(load_config("arithmetic"), embedded)


@pytest.fixture
def counting(embedded: LanguageModel) -> Counting:
    return Counting(embedded)


@pytest.fixture
def asked(embedded: LanguageModel) -> list[Question]:
    return ask(embedded, Arithmetic().train()[:2])


@pytest.fixture
def shared(counting: Counting, policy: Policy, tmp_path: Path) -> Callable[..., SharedEngine]:
    def make(start: str = "weights", note: str = "note") -> SharedEngine:
        return SharedEngine(
            sampler=counting,
            policy=policy,
            folder=tmp_path / "shared",
            start=start,
            note=tmp_path / note,
        )

    return make


def test_the_second_run_reads_what_the_first_has_sampled(
    shared: Callable[..., SharedEngine], counting: Counting, asked: list[Question], tmp_path: Path
) -> None:
    told: list[tuple[int, Rollout]] = []
    first = shared().generate(asked, step=1, sampling=SAMPLING)
    second = shared(note="second").generate(
        asked,
        step=1,
        sampling=replace(SAMPLING, slots=2),  # changes nothing, so it is no other answer
        finished=lambda number, rollout: told.append((number, rollout)),
    )
    assert second == first  # every field of every answer, log-probabilities to the last bit
    assert counting.calls == 1
    assert told == [(number, r) for number, rollouts in enumerate(first) for r in rollouts]
    assert (tmp_path / "note").read_text() == (tmp_path / "second").read_text()
    (file,) = (tmp_path / "shared").glob("*.jsonl")
    assert file.name.startswith("step-1-seed-4-")


def test_whatever_decides_answers_makes_others(
    shared: Callable[..., SharedEngine], counting: Counting, asked: list[Question], tmp_path: Path
) -> None:
    usual: dict[str, Any] = {"questions": asked, "step": 1, "sampling": SAMPLING}
    others: list[dict[str, Any]] = [
        {},
        {"questions": asked[:1]},
        {"step": 2},
        {"sampling": replace(SAMPLING, seed=5)},
        {"sampling": replace(SAMPLING, samples=2)},
        {"sampling": replace(SAMPLING, max_tokens=11)},
        {"sampling": replace(SAMPLING, stop_strings=("9",))},
        {"sampling": replace(SAMPLING, distribution=Distribution(temperature=0.5))},
    ]
    for change in others:
        shared().generate(**{**usual, **change})
    shared(start="other weights").generate(**usual)
    assert counting.calls == len(others) + 1 == len(list((tmp_path / "shared").glob("*.jsonl")))


def test_nothing_is_shared_once_the_policy_has_learned(
    shared: Callable[..., SharedEngine],
    counting: Counting,
    policy: Policy,
    asked: list[Question],
    tmp_path: Path,
) -> None:
    greedy = replace(SAMPLING, samples=1, distribution=Distribution(temperature=0.0))
    sampler = shared()
    sampler.generate(asked, step=EVALUATION_STEP, sampling=greedy)
    # Greedy answers draw nothing, so all seeds have the same.
    sampler.generate(asked, step=EVALUATION_STEP, sampling=replace(greedy, seed=99))
    assert counting.calls == 1
    policy.version = 1  # evaluations say version 0 whenever they are made
    sampler.generate(asked, step=EVALUATION_STEP, sampling=greedy, version=0)
    assert counting.calls == 2
    assert not (tmp_path / "note").exists()  # evaluations are no first answers
