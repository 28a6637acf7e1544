"""Metrics of a step's rollouts against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey.rollout.collect import Collected
from covey.rollout.metrics import repetition, rollout_metrics
from covey.types import Episode, Finish, Group, Prompt, Rollout


def share_repeated(rows: list[list[int]]) -> float:
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows]
    count = sum(map(len, grams))
    return sum(len(row) - len(set(row)) for row in grams) / count if count else 0.0


def test_repetition_is_of_one_completion_only() -> None:
    assert repetition([[1, 2, 3, 4], [0, 2, 3, 4]]) == 0.0
    assert repetition([[5, 6, 7, 8]] * 9) == 0.0
    assert repetition([[1, 2, 1, 2, 1, 2], [9]]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("vocabulary", [2, 10, 150_000])
def test_repetition_is_the_exact_share_of_repeated_4_grams(vocabulary: int) -> None:
    draw = np.random.default_rng(vocabulary)
    for _ in range(50):
        sizes = draw.integers(0, 40, draw.integers(0, 129))
        rows = [draw.integers(0, vocabulary, size).tolist() for size in sizes]
        assert repetition(rows) == pytest.approx(share_repeated(rows), abs=1e-15)


def episode(sample: int, finish: Finish) -> Rollout:
    ended = Episode(messages=(), turn_rewards=(None,), outcome=None, finish=finish)
    rollout = Rollout.single_turn(
        prompt_id="p", sample=sample, prompt_tokens=(1,), tokens=(2, 3), sampler_logp=(-1.0, -1.0),
        text="", finish=finish, reward=0.0, success=False,
    )  # fmt: skip
    return replace(rollout, episode=ended)


def test_a_turn_cut_at_rollout_max_tokens_counts_as_an_episode_at_a_limit() -> None:
    ends: list[Finish] = ["stop", "length", "turn_limit", "tool_limit", "token_limit", "error"]
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="1")
    group = Group(prompt=prompt, rollouts=tuple(episode(n, end) for n, end in enumerate(ends)))
    collected = Collected(groups=(group,))
    metrics = rollout_metrics(collected)
    assert metrics["rollout/limit_rate"] == pytest.approx(4 / 6)
    assert metrics["rollout/stop_rate"] == pytest.approx(4 / 6)  # all but length and token_limit
