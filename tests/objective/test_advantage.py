import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.objective.advantage import centered, group_sum, per_token, standardized, zero_variance

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])

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


def test_ddof_zero_is_a_constant_factor_larger() -> None:
    ratio = standardized(REWARDS, GROUP, ddof=0, eps=0.0) / standardized(
        REWARDS, GROUP, ddof=1, eps=0.0
    )
    assert ratio.tolist() == pytest.approx([math.sqrt(3 / 2)] * 6)


@pytest.mark.parametrize("value", [0.3, 0.1 + 0.2, 1e-30, 12345.678, -7.1, 1e12])
@pytest.mark.parametrize("eps", [1e-9, 1e-6, 0.0])
def test_equal_rewards_give_exactly_zero(value: float, eps: float) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((6,), value, dtype=dtype)
        assert (
            standardized(rewards, torch.zeros(6, dtype=torch.long), eps=eps).tolist() == [0.0] * 6
        )


def test_rewards_equal_up_to_rounding_give_exactly_zero() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert standardized(rewards, torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4


@given(rows)
def test_advantages_of_a_group_sum_to_zero(data: list[tuple[float, int]]) -> None:
    rewards, group = unpack(data)
    for advantage in (centered(rewards, group), standardized(rewards, group)):
        assert group_sum(advantage, group).abs().max() < 1e-9


@given(rows, st.floats(-100, 100))
def test_a_shift_of_rewards_changes_nothing(data: list[tuple[float, int]], shift: float) -> None:
    rewards, group = unpack(data)
    # Powers of two shift without rounding, so that the law can be exact enough to test.
    rewards, shift = (rewards * 256).round() / 256, round(shift * 256) / 256
    torch.testing.assert_close(
        standardized(rewards + shift, group), standardized(rewards, group), atol=1e-6, rtol=1e-6
    )


@given(rows, st.randoms())
def test_order_of_rows_changes_nothing(data: list[tuple[float, int]], random: object) -> None:
    rewards, group = unpack(data)
    order = list(range(len(data)))
    random.shuffle(order)  # type: ignore[attr-defined]
    torch.testing.assert_close(
        standardized(rewards[order], group[order]), standardized(rewards, group)[order]
    )


def test_a_row_that_could_not_be_scored_enters_no_statistic() -> None:
    with_gap = torch.tensor([1.0, math.nan, 0.0, 0.0], dtype=torch.float64)
    advantage = standardized(with_gap, torch.zeros(4, dtype=torch.long))
    without = standardized(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long))
    assert advantage[1] == 0.0
    assert advantage[[0, 2, 3]].tolist() == pytest.approx(without.tolist())


def test_a_group_of_nothing_but_failures_is_zero() -> None:
    rewards = torch.tensor([math.nan, math.nan, 1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([5, 5, 2, 2])
    assert standardized(rewards, group)[:2].tolist() == [0.0, 0.0]
    assert zero_variance(rewards, group).tolist() == [True, True, False, False]


def test_per_token_fills_the_mask_and_nothing_else() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    spread = per_token(torch.tensor([2.0, 3.0]), mask)
    assert spread.tolist() == [[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
