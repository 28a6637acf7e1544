"""Credit of turns: worked numbers, and the laws that tie them to whole rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.objective import build, policy_loss, with_advantage, with_weight
from covey.objective.advantage import group_standardized
from covey.objective.algorithms.turns import by_state, by_turn, turn_table
from covey.objective.masked import joined
from covey.types import Batch

LENGTHS = [5, 3, 4, 3, 5, 4, 5, 2]
LOGP = [
    [-0.9, -0.23, -2.4, -0.25, -0.1], [-1.2, -1.5, -0.19], [-1.3, -0.75, -1.06, -0.6],
    [-1.2, -1.5, -0.19], [-0.9, -0.23, -2.4, -0.25, -0.1], [-0.4, -1.55, -0.6, -0.13],
    [-1.05, -0.13, -1.57, -1.1, -0.37], [-0.65, -1.65],
]  # fmt: skip
OLD = [
    [-1.2, -0.45, -2.1, -0.3, -0.08], [-0.9, -1.75, -0.2], [-2.6, -0.65, -1.1, -0.35],
    [-0.9, -1.75, -0.2], [-1.2, -0.45, -2.1, -0.3, -0.08], [-0.5, -1.4, -0.95, -0.15],
    [-1.0, -0.25, -1.85, -0.7, -0.4], [-0.8, -1.3],
]  # fmt: skip
ROLLOUT = [0, 0, 1, 1, 1, 2, 3, 3]
GROUP = [0, 0, 0, 0, 0, 1, 1, 1]
TURN = [0, 1, 0, 1, 2, 0, 0, 1]
STATE = [7, 8, 7, 8, 8, 7, 7, 9]
REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
TURN_REWARDS = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (5 - len(row)) for row in rows], dtype=torch.float64)


def batch_of_turns() -> Batch:
    """Four rollouts in two groups; every row is a turn."""
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(5) < lengths[:, None]

    def spread(values: list[float], dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].expand(8, 5).contiguous()

    return Batch(
        prompt_tokens=torch.zeros(8, 1, dtype=torch.long),
        prompt_lengths=torch.ones(8, dtype=torch.long),
        tokens=torch.zeros(8, 5, dtype=torch.long),
        lengths=lengths,
        mask=mask,
        sampler_logp=padded(OLD),
        old_logp=padded(OLD),
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
        success=torch.tensor(REWARDS) > 0,
        group=torch.tensor(GROUP),
        truncated=torch.zeros(8, dtype=torch.bool),
        rollout=torch.tensor(ROLLOUT),
        turn=spread(TURN),
        turn_reward=spread(TURN_REWARDS, torch.float64),
        state=spread(STATE),
    )


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("std", [1.4142115097444972, 1.8618043195706773, -1.4142115097444972, -1.2844550503793193,
                 -1.2844550503793193, -1.414211536734971, 1.414211536734971, 0.7071057811879616]),
        ("mean", [0.975, 7 / 6, -0.975, -5 / 6, -5 / 6, -0.9875, 0.9875, 0.5]),
    ],
)  # fmt: skip
def test_gigpo_has_the_worked_advantages(normalize: str, expected: list[float]) -> None:
    rollouts = joined(batch_of_turns())
    found = rollouts.split(by_state(rollouts.batch, normalize=normalize))  # type: ignore[arg-type]
    torch.testing.assert_close(found[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_gigpo_has_the_worked_loss() -> None:
    objective, batch = build("gigpo"), batch_of_turns()
    logp = padded(LOGP).requires_grad_()
    out = policy_loss(objective, with_weight(objective, with_advantage(objective, batch)), logp)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.10748600081463162, abs=1e-12)
    assert logp.grad is not None
    assert logp.grad[1, 2].item() == pytest.approx(-0.058766117626887146, abs=1e-8)
    assert logp.grad[5, 2].item() == pytest.approx(0.1254288561641749, abs=1e-8)


def test_returns_add_up_to_the_reward() -> None:
    batch = joined(batch_of_turns()).batch
    paid = replace(batch, rewards=torch.tensor([2.0, 0.5, -1.0, 1.0], dtype=torch.float64))
    table = turn_table(paid, gamma=1.0)
    torch.testing.assert_close(table.returns[:, 0], paid.rewards)  # whatever the turns earned
    discounted = turn_table(batch, gamma=0.5).returns
    torch.testing.assert_close(discounted[0, :2], torch.tensor([0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(discounted[3, :2], torch.tensor([0.75, 0.5], dtype=torch.float64))


def test_a_single_turn_is_the_whole_rollout() -> None:
    batch = joined(batch_of_turns()).batch
    single = replace(batch, turn=None, turn_reward=None, state=None)
    expected = group_standardized(single)
    for found in (by_turn(single), by_turn(single, compare="group"), by_state(single)):
        torch.testing.assert_close(found, expected)


def test_a_failed_rollout_is_in_no_cell() -> None:
    batch = joined(batch_of_turns()).batch
    failed = replace(batch, rewards=batch.rewards.where(batch.rollout != 0, torch.nan))  # type: ignore[operator]
    for advantage in (by_turn, by_state):
        found = advantage(failed)
        assert not found[0].any()
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "rloo", "gigpo", "sapo"])
def test_a_rollout_in_several_rows_has_the_loss_of_one_row(name: str) -> None:
    """Ratios of whole rollouts included, in float64."""
    objective, rows = build(name, beta=0.1), batch_of_turns()
    rows = replace(rows, ref_logp=padded(OLD) - 0.1)
    whole = joined(rows)
    losses = []
    for batch, logp in ((rows, padded(LOGP)), (whole.batch, whole.join(padded(LOGP)))):
        logp = logp.clone().requires_grad_()
        filled = with_weight(objective, with_advantage(objective, batch))
        loss = policy_loss(objective, filled, logp).loss
        (grad,) = torch.autograd.grad(loss, logp)
        losses.append((loss, whole.join(grad) if batch is rows else grad))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-15)
