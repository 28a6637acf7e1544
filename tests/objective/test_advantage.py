"""Single advantages: numbers worked out by hand, and what happens at the edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.objective.advantage import (
    ADVANTAGES,
    batch_standardized,
    best_of_group,
    centered,
    group_sum,
    leave_one_out,
    per_token,
    returns,
    rollout_rewards,
    standardized,
    sum_of_standardized,
    token_rewards,
    whitened,
    zero_variance,
)
from tests.objective.laws import make_step, seeds

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
SINGLE = torch.zeros(4, dtype=torch.long)
OF_REWARDS = {
    "centered": centered,
    "leave_one_out": leave_one_out,
    "standardized": standardized,
    "batch_standardized": batch_standardized,
    "batch_standardized, centered": lambda r, g: batch_standardized(r, g, of="centered"),
    "sum_of_standardized": lambda r, g: sum_of_standardized(
        torch.stack([r, r.square()]), g, weights=[1.0, 0.5]
    ),
}

rows = st.lists(
    st.tuples(st.floats(-10, 10, allow_subnormal=False), st.integers(0, 3)), min_size=2, max_size=24
)


def unpack(rows: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, group = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group)


@pytest.mark.parametrize(
    ("ddof", "eps", "expected"),
    [
        (1, 1e-6, [1.1546985383827155, -0.5773492691913577, -0.5773492691913577]),
        (1, 1e-4, [1.1545005730142688, -0.5772502865071343, -0.5772502865071343]),
        (0, 1e-8, [1.4142135323730958, -0.7071067661865478, -0.7071067661865478]),
    ],
)
def test_standardized_matches_worked_numbers(ddof: int, eps: float, expected: list[float]) -> None:
    advantage = standardized(REWARDS, GROUP, ddof=ddof, eps=eps)
    assert advantage[:3].tolist() == pytest.approx(expected, abs=1e-12)
    # The second group is the first with right and wrong exchanged.
    assert advantage[3:].tolist() == pytest.approx([-a for a in expected[::-1]], abs=1e-12)


@pytest.mark.parametrize("name", OF_REWARDS)
@pytest.mark.parametrize("value", [0.3, 0.1 + 0.2, 1e-30, 12345.678, -7.1, 1e12])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((6,), value, dtype=dtype)
        advantage = OF_REWARDS[name](rewards, torch.zeros(6, dtype=torch.long))
        assert advantage.tolist() == [0.0] * 6
        assert advantage.dtype == torch.float64


@pytest.mark.parametrize("eps", [1e-9, 1e-6, 0.0])
def test_equal_rewards_give_exactly_zero_whatever_eps(eps: float) -> None:
    rewards = torch.full((4,), 0.3)
    for advantage in (
        standardized(rewards, SINGLE, eps=eps),
        batch_standardized(rewards, SINGLE, eps=eps),
        whitened(rewards[None], torch.ones(1, 4, dtype=torch.bool), eps=eps),
    ):
        assert advantage.flatten().tolist() == [0.0] * 4


@pytest.mark.parametrize("name", OF_REWARDS)
def test_rewards_equal_up_to_rounding_give_exactly_zero(name: str) -> None:
    # Beside a group that has something to learn, and with batch statistics that are not 0.
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 1.0, 0.0], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    advantage = OF_REWARDS[name](rewards, torch.tensor([7, 7, 7, 2, 2]))
    assert advantage[:3].tolist() == [0.0] * 3
    assert (advantage[3:] != 0).all()


@pytest.mark.parametrize("name", OF_REWARDS)
@given(rows)
def test_any_rewards_of_a_group_sum_to_zero(name: str, data: list[tuple[float, int]]) -> None:
    # Groups of any size, that of one included, and rewards of any spread.
    rewards, group = unpack(data)
    advantage = OF_REWARDS[name](rewards, group)
    assert advantage.isfinite().all()
    assert group_sum(advantage, group).abs().max() < 1e-9 * max(1.0, float(advantage.abs().max()))


@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_row_that_could_not_be_scored_enters_no_statistic(name: str) -> None:
    with_gap = torch.tensor([1.0, math.nan, 0.0, 0.5, math.nan, 0.2, 0.9], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    scored = ~with_gap.isnan()
    advantage = OF_REWARDS[name](with_gap, group)
    assert (advantage[~scored] == 0.0).all()
    without = OF_REWARDS[name](with_gap[scored], group[scored])
    assert advantage[scored].tolist() == pytest.approx(without.tolist(), abs=1e-14)


@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_group_of_nothing_but_failures_is_zero(name: str) -> None:
    rewards = torch.tensor([math.nan, math.nan, 1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([5, 5, 2, 2])
    assert OF_REWARDS[name](rewards, group)[:2].tolist() == [0.0, 0.0]
    assert zero_variance(rewards, group).tolist() == [True, True, False, False]


def test_sum_of_standardized_is_not_drowned_by_the_larger_part() -> None:
    parts = torch.tensor([[100.0, 0.0, 100.0, 0.0], [0.0, 0.01, 0.01, 0.0]])
    advantage = sum_of_standardized(parts, SINGLE, weights=[1.0, 1.0], eps=0.0)
    # Both parts have values +-a in the group; where they disagree they cancel.
    assert advantage.tolist() == pytest.approx([0.0, 0.0, math.sqrt(1.5), -math.sqrt(1.5)])


def test_best_of_group_rewards_only_the_lead_of_the_best() -> None:
    batch = make_step(0, rows=6, groups=2).batch
    rewards = torch.tensor([0.2, 0.7, 1.0, 0.5, 0.5, 0.1], dtype=torch.float64)
    mask = torch.ones_like(batch.mask)
    batch = replace(batch, rewards=rewards, group=GROUP, mask=mask)
    advantage = best_of_group(batch, eps=0.0)[:, 0]
    deviation = float(rewards[:3].std())
    # The third leads its group; the fourth and fifth share the lead of theirs, which is then 0.
    assert advantage.tolist() == pytest.approx([0, 0, 0.3 / deviation, 0, 0, 0])


@given(seeds)
def test_every_advantage_is_zero_outside_the_mask_and_for_failures(seed: int) -> None:
    batch = make_step(seed).batch
    rewards = batch.rewards.clone()
    rewards[:3] = math.nan
    batch = replace(batch, rewards=rewards)
    for function in ADVANTAGES.values():
        advantage = function(batch)
        assert advantage.dtype == torch.float64
        assert advantage.isfinite().all()
        assert (advantage[~batch.mask] == 0).all()
        assert (advantage[:3] == 0).all()


def test_returns_are_discounted_over_trained_tokens() -> None:
    mask = torch.tensor([[True, False, True, True, False]])
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0, 9.0]], dtype=torch.float64)
    total = returns(rewards, mask, gamma=0.5)
    assert total.tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 0.0, 2 + 0.5 * 4, 4.0, 0.0]]


def test_the_reward_stands_at_the_last_trained_token_less_the_penalty() -> None:
    batch = make_step(1, empty=False).batch
    penalty = torch.rand(batch.mask.shape, dtype=torch.float64).where(batch.mask, 0.0)
    batch = replace(batch, token_penalty=penalty)
    rewards = token_rewards(batch) + penalty
    last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).argmax(dim=1)
    expected = torch.zeros_like(rewards)
    expected[torch.arange(len(last)), last] = batch.rewards
    torch.testing.assert_close(rewards, expected)
    torch.testing.assert_close(rollout_rewards(batch), token_rewards(batch).sum(dim=1))


def test_per_token_fills_the_mask_and_nothing_else() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    spread = per_token(torch.tensor([2.0, 3.0]), mask)
    assert spread.tolist() == [[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
