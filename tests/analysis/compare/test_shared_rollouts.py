from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.analysis.compare.shared_rollouts import SharedEngine
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
    """An engine that counts its calls."""

    def __init__(self, model: LanguageModel) -> None:
        self.engine = NativeEngine(model)
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
        return self.engine.generate(
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
    def make(start: str = "weights", names: str = "names") -> SharedEngine:
        return SharedEngine(
            engine=counting,
            policy=policy,
            folder=tmp_path / "shared",
            start=start,
            names_file=tmp_path / names,
        )

    return make


def test_second_run_reads_the_rollouts_of_the_first(
    shared: Callable[..., SharedEngine], counting: Counting, asked: list[Question], tmp_path: Path
) -> None:
    received: list[tuple[int, Rollout]] = []
    first = shared().generate(asked, step=1, sampling=SAMPLING)
    second = shared(names="second").generate(
        asked,
        step=1,
        sampling=replace(SAMPLING, slots=2),  # changes no completion
        finished=lambda number, rollout: received.append((number, rollout)),
    )
    assert second == first  # every field of every rollout, log-probabilities to the last bit
    assert counting.calls == 1
    assert received == [(number, r) for number, rollouts in enumerate(first) for r in rollouts]
    assert (tmp_path / "names").read_text() == (tmp_path / "second").read_text()
    (file,) = (tmp_path / "shared").glob("*.jsonl")
    assert file.name.startswith("step-1-seed-4-")


def test_everything_that_decides_rollouts_is_in_the_file_name(
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


def test_nothing_is_shared_after_the_first_optimizer_step(
    shared: Callable[..., SharedEngine],
    counting: Counting,
    policy: Policy,
    asked: list[Question],
    tmp_path: Path,
) -> None:
    greedy = replace(SAMPLING, samples=1, distribution=Distribution(temperature=0.0))
    engine = shared()
    engine.generate(asked, step=EVALUATION_STEP, sampling=greedy)
    # Greedy decoding draws nothing, so all seeds share its completions.
    engine.generate(asked, step=EVALUATION_STEP, sampling=replace(greedy, seed=99))
    assert counting.calls == 1
    policy.version = 1  # evaluations always pass version 0
    engine.generate(asked, step=EVALUATION_STEP, sampling=greedy, version=0)
    assert counting.calls == 2
    assert not (tmp_path / "names").exists()  # evaluations are not part of the first step
