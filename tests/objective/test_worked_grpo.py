"""GRPO against numbers worked out by hand and checked by finite differences."""

from dataclasses import replace

import pytest
import torch

from covey.objective import ALGORITHMS, policy_loss, with_advantage, with_weight
from covey.types import Batch

MASK = [
    [1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0],
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
    [1, 1, 0, 0, 0],
]
OLD = [
    [-1.2, -0.45, -2.1, -0.3, -0.08],
    [-0.9, -1.75, -0.2, 0, 0],
    [-2.6, -0.65, -1.1, -0.35, 0],
    [-0.5, -1.4, -0.95, -0.15, 0],
    [-1.0, -0.25, -1.85, -0.7, -0.4],
    [-0.8, -1.3, 0, 0, 0],
]
NOW = [
    [-0.9, -0.23, -2.4, -0.25, -0.1],
    [-1.2, -1.5, -0.19, 0, 0],
    [-1.3, -0.75, -1.06, -0.6, 0],
    [-0.4, -1.55, -0.6, -0.13, 0],
    [-1.05, -0.13, -1.57, -1.1, -0.37],
    [-0.65, -1.65, 0, 0, 0],
]
REF = [
    [-1.1, -0.65, -1.95, -0.28, -0.09],
    [-1.02, -1.57, -0.15, 0, 0],
    [-2.35, -0.69, -1.01, -0.41, 0],
    [-0.58, -1.29, -1.09, -0.12, 0],
    [-0.93, -0.28, -1.64, -0.86, -0.39],
    [-0.75, -1.39, 0, 0, 0],
]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
GROUP = [0, 0, 0, 1, 1, 1]

ADVANTAGES = [
    1.1545005730142688,
    -0.5772502865071343,
    -0.5772502865071343,
    0.5772502865071344,
    0.5772502865071344,
    -1.1545005730142686,
]
CASES = {
    "beta 0": (0.0, False, 0.04671817023636441, [[0.0, 0.0, -0.028509168675881814, -0.040456436105315276, -0.03772133100001583], [0.0, 0.04117800220363562, 0.03239176379643972, 0.0, 0.0], [0.08825427302762008, 0.02176323578348472, 0.025033679900094516, 0.0, 0.0], [-0.026581676212438343, -0.02070183024959752, 0.0, -0.024537979826058633, 0.0], [-0.018303248594235124, -0.021694929353669554, 0.0, -0.012898081287518275, -0.019827672498574776], [0.11177819158145014, 0.0, 0.0, 0.0, 0.0]]),
    "beta 0.04": (0.04, False, 0.04822023970165764, [[0.00024169232922935743, 0.00045727090691325767, -0.029266918256535372, -0.04041703015004662, -0.03773473122279472], [-0.00043826080693735585, 0.041328238159400184, 0.032301073187123296, 0.0, 0.0], [0.08933771011243483, 0.021660174872575787, 0.024948228072801143, -0.0003487493294287525, 0.0], [-0.026307126564790465, -0.02119671372737381, 0.0006456226763593064, -0.024554730104532248, 0.0], [-0.01847324439634096, -0.02150920665556963, 9.014157345873578e-05, -0.013259746821280149, -0.01980127072965045], [0.11209540018799694, -0.000989766955552572, 0.0, 0.0, 0.0]]),
    "on policy": (0.0, True, 0.0, [[-0.03848335243380896] * 5, [0.03206946036150746] * 3 + [0.0] * 2, [0.024052095271130593] * 4 + [0.0], [-0.0240520952711306] * 4 + [0.0], [-0.01924167621690448] * 5, [0.09620838108452237] * 2 + [0.0] * 3]),
}  # fmt: skip


def worked_batch() -> Batch:
    mask = torch.tensor(MASK, dtype=torch.bool)
    return Batch(
        prompt_tokens=torch.zeros(6, 1, dtype=torch.long),
        prompt_lengths=torch.ones(6, dtype=torch.long),
        tokens=torch.zeros(6, 5, dtype=torch.long),
        lengths=mask.sum(1),
        mask=mask,
        sampler_logp=torch.tensor(OLD, dtype=torch.float64),
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
        success=torch.tensor(REWARDS) > 0,
        group=torch.tensor(GROUP),
        old_logp=torch.tensor(OLD, dtype=torch.float64),
        ref_logp=torch.tensor(REF, dtype=torch.float64),
    )


@pytest.mark.parametrize("name", CASES)
def test_grpo_reproduces_worked_loss_and_gradient(name: str) -> None:
    beta, on_policy, expected_loss, expected_grad = CASES[name]
    objective = ALGORITHMS["grpo"](low=0.2, high=0.2, beta=beta, ddof=1, eps=1e-4)
    batch = worked_batch()
    if on_policy:
        batch = replace(batch, old_logp=None)
    batch = with_weight(objective, with_advantage(objective, batch))
    logp = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    loss = policy_loss(objective, batch, logp).loss
    loss.backward()

    assert batch.advantage[:, 0].tolist() == pytest.approx(ADVANTAGES, abs=1e-9)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-9)
    torch.testing.assert_close(
        logp.grad, torch.tensor(expected_grad, dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_grpo_flags_exactly_the_clipped_tokens() -> None:
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_weight(objective, with_advantage(objective, worked_batch()))
    out = policy_loss(objective, batch, torch.tensor(NOW, dtype=torch.float64))
    clipped = [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]  # fmt: skip
    assert (out.clipped_low | out.clipped_high).int().tolist() == clipped
    positive = batch.advantage > 0
    assert not (out.clipped_low & positive).any()
    assert not (out.clipped_high & ~positive).any()
