"""Curriculum and replay: what a step is made of, by what earlier steps have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.schema import Curriculum, Replay
from covey.errors import ConfigError, RunError
from covey.rng import weighted_order
from covey.rollout.prompts import PromptChoice, PromptRecord
from covey.rollout.replay import ReplayBuffer
from covey.tasks.registry import make_task
from covey.types import Group, Prompt, Rollout

PROMPTS = [
    Prompt(id=f"p{n}", task="t", messages=({"role": "user", "content": f"{n}?"},), target=str(n))
    for n in range(8)
]


def group(number: int, results: Sequence[bool | None], version: int = 0) -> Group:
    """Return a group of a prompt; None: not scored."""
    rollouts = [
        Rollout.single_turn(
            prompt_tokens=(1,), tokens=(2, 3), sampler_logp=(-0.1, -0.7), policy_version=version,
            prompt_id=PROMPTS[number].id, sample=sample, text="x", finish="stop",
            reward=None if result is None else float(result), success=result,
        )
        for sample, result in enumerate(results)
    ]  # fmt: skip
    return Group(prompt=PROMPTS[number], rollouts=tuple(rollouts))


def choice(prompts: Sequence[Prompt] = PROMPTS, **settings: Any) -> PromptChoice:
    return PromptChoice(settings=Curriculum(**settings), prompts=prompts, seed=7)


def test_pass_rates_are_of_scored_completions() -> None:
    chooser = choice(sampling="hard", memory=0.25)
    chooser.add([group(3, [True, False, None, False])], [3])
    assert chooser.records == {"p3": PromptRecord(3, 3, 1, 1 / 3)}
    chooser.add([group(3, [True, True])], [3])
    assert chooser.records["p3"].rate == pytest.approx(0.75 / 3 + 0.25)
    assert chooser.records["p3"].pass_rate == 3 / 5
    chooser.add([group(4, [None, None])], [4])
    assert "p4" not in chooser.records


@pytest.mark.parametrize(
    ("sampling", "expected"), [("uniform", 1.0), ("hard", 0.75), ("uncertain", 0.1875)]
)
def test_the_weight_of_a_prompt(sampling: Any, expected: float) -> None:
    chooser = choice(sampling=sampling, drop_above=0.9, floor=0.01)
    chooser.add([group(0, [True, False, False, False]), group(1, [True] * 4)], [0, 1])
    chooser.add([group(2, [False] * 4)], [2])
    weights = chooser.weights()
    assert weights[0] == pytest.approx(expected)
    assert weights[1] == 0  # solved nine times of ten: not drawn again
    assert weights[2] == {"uniform": 1.0, "hard": 1.0, "uncertain": 0.01}[sampling]
    assert weights[3] == {"uniform": 1.0, "hard": 0.5, "uncertain": 0.25}[sampling]


def test_draws_follow_the_weights_and_the_address() -> None:
    weights = np.array([4.0, 1.0, 0.0, 3.0])
    orders = [weighted_order(weights, seed=1, step=step) for step in range(4000)]
    assert {len(order) for order in orders} == {3}
    first = np.bincount([order[0] for order in orders], minlength=4) / len(orders)
    # Three standard errors of a share of 4000 draws.
    assert np.abs(first - weights / 8).max() < 3 * 0.5 / 4000**0.5
    assert orders[17] == weighted_order(weights, seed=1, step=17)
    assert orders[:40] != [weighted_order(weights, seed=2, step=step) for step in range(40)]


def test_dropped_prompts_come_back_when_too_few_are_left() -> None:
    chooser = choice(drop_above=0.9)
    numbers = range(6)
    chooser.add([group(n, [True] * 10 + [n > 2] * 1) for n in numbers], numbers)
    picks = chooser.picks(step=1, count=4)
    assert set(picks[:2]) == {6, 7}
    assert picks[2:] == (0, 1)  # of the dropped, the lowest pass rate
    assert chooser.metrics(picks)["data/drawn_again"] == 2
    assert chooser.metrics(picks)["data/dropped_prompts"] == 6


def test_without_a_setting_results_decide_nothing() -> None:
    chooser = choice()
    chooser.add([group(0, [True])], [])
    assert chooser.picks(1, 4) == ()
    assert chooser.metrics(()) == {}


def test_the_parts_of_a_mixture_follow_progress() -> None:
    parts = {
        "easy": {"name": "arithmetic", "weight": 3.0, "train_size": 30},
        "hard": {"name": "countdown", "weight": 1.0, "train_size": 10},
    }
    prompts = make_task("mixed", {"parts": parts}).train()
    chooser = choice(prompts, mixture="progress", memory=0.5, floor=0.05)
    assert chooser.block.count("easy") == 3 * chooser.block.count("hard")
    assert chooser.shares() == {"easy": 0.5, "hard": 0.5}

    def results(name: str, share: float) -> None:
        number = chooser.block.index(name)
        one = group(0, [True] * int(4 * share) + [False] * int(4 - 4 * share))
        chooser.add([replace(one, prompt=prompts[number])], [number])

    for share in (0.0, 0.25, 0.75):
        results("easy", 0.5)
        results("hard", share)
    # hard: fast 0, 0.125, 0.4375; slow 0, 0.025, 0.0975; easy does not move: the floor.
    moved = 0.4375 - 0.0975
    assert chooser.shares()["hard"] == pytest.approx(moved / (moved + 0.05))
    weights = chooser.weights()
    hard = [n for n in range(len(prompts)) if chooser.block[n % len(chooser.block)] == "hard"]
    assert weights[hard].sum() == pytest.approx(chooser.shares()["hard"])


def test_a_mixture_needs_parts() -> None:
    with pytest.raises(ConfigError, match=r"mixture = 'progress' needs task\.name"):
        choice(mixture="progress")


def test_statistics_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    chooser, again = choice(sampling="hard"), choice(sampling="hard")
    chooser.add([group(2, [True, False, False])], [2])
    chooser.save(tmp_path)
    again.load(tmp_path)
    assert again.records == chooser.records
    assert again.picks(3, 4) == chooser.picks(3, 4)
    other = choice(PROMPTS[1:], sampling="hard")
    with pytest.raises(RunError, match="the data has changed"):
        other.load(tmp_path)
    with pytest.raises(RunError, match=r"prompts\.json"):
        again.load(tmp_path / "nowhere")


def buffer(**settings: Any) -> ReplayBuffer:
    return ReplayBuffer(settings=Replay(**settings), seed=0)


def test_replay_keeps_the_newest_mixed_groups_of_young_versions() -> None:
    kept = buffer(groups=2, size=3, max_age=4)
    kept.add([group(n, [True, n % 2 == 0], version=n) for n in range(6)], version=5)
    assert [g.prompt.id for g in kept.groups] == ["p1", "p3", "p5"]  # the even ones are not mixed
    kept.add([group(7, [True, False], version=6)], version=7)
    assert [g.prompt.id for g in kept.groups] == ["p3", "p5", "p7"]
    drawn = kept.draw(step=1, version=9, without={"p7"})
    assert [g.prompt.id for g in drawn] == ["p5"]  # p3 is six optimizer steps old
    assert kept.metrics(drawn, 9) == {
        "data/replayed_groups": 1, "data/replay_size": 3, "data/replay_age": 4,
    }  # fmt: skip


def test_a_prompt_is_kept_once_with_its_newest_group() -> None:
    kept = buffer(groups=2)
    kept.add([group(1, [True, False], version=0)], version=1)
    kept.add([group(1, [False, True], version=1)], version=2)
    assert [g.rollouts[0].policy_version for g in kept.groups] == [1]


def test_replayed_groups_come_back_as_they_were(tmp_path: Path) -> None:
    kept, again = buffer(groups=2), buffer(groups=2)
    kept.add([group(1, [True, False]), group(2, [True, False, None])], version=1)
    kept.save(tmp_path)
    again.load(tmp_path)
    assert again.groups == kept.groups
    (tmp_path / "replay.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"replay\.jsonl"):
        again.load(tmp_path)
