"""Laws that the loss of every algorithm obeys."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.objective import ALGORITHMS, policy_loss, with_advantage, with_weight
from covey.types import Batch
from tests.conftest import make_batch

NAMES = sorted(ALGORITHMS)


def filled(name: str, seed: int, rows: int = 7) -> tuple[object, Batch, torch.Tensor]:
    objective = ALGORITHMS[name]()
    batch = make_batch(rows=rows, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = lambda: -torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    batch = replace(batch, old_logp=noise(), ref_logp=noise(), entropy=-noise())
    batch = with_weight(objective, with_advantage(objective, batch))
    return objective, batch, noise()


def gradient(objective: object, batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    logp = logp.clone().requires_grad_()
    policy_loss(objective, batch, logp).loss.backward()
    return logp.grad


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 7), max_size=5))
def test_any_split_adds_up_to_the_whole(name: str, seed: int, cuts: list[int]) -> None:
    objective, batch, logp = filled(name, seed)
    whole = gradient(objective, batch, logp)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    parts = torch.zeros_like(whole)
    for index in order.tensor_split(sorted(cuts)):
        if len(index):
            rows = batch.rows(index)
            width = rows.mask.shape[1]
            parts[index, :width] = gradient(objective, rows, logp[index, :width])
    torch.testing.assert_close(parts, whole, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_garbage_in_the_padding_changes_nothing(name: str, garbage: float) -> None:
    objective, batch, logp = filled(name, seed=3)
    spoil = lambda x: x.where(batch.mask, garbage)  # noqa: E731
    spoiled = replace(
        batch,
        old_logp=spoil(batch.old_logp),
        ref_logp=spoil(batch.ref_logp),
        sampler_logp=spoil(batch.sampler_logp),
    )
    expected, got = gradient(objective, batch, logp), gradient(objective, spoiled, spoil(logp))
    assert torch.equal(expected[batch.mask], got[batch.mask])
    assert (got[~batch.mask] == 0).all()
    loss = policy_loss(objective, spoiled, spoil(logp)).loss
    assert torch.equal(loss, policy_loss(objective, batch, logp).loss)


@pytest.mark.parametrize("name", NAMES)
def test_wider_padding_changes_nothing(name: str) -> None:
    objective, batch, logp = filled(name, seed=4)
    widen = lambda x: torch.nn.functional.pad(x, (0, 5))  # noqa: E731
    wide = replace(
        batch,
        **{n: widen(getattr(batch, n)) for n in ("tokens", "mask", "sampler_logp", "old_logp", "ref_logp", "entropy")},
    )  # fmt: skip
    wide = with_weight(objective, with_advantage(objective, wide))
    got = gradient(objective, wide, widen(logp))
    torch.testing.assert_close(
        got[:, :-5], gradient(objective, batch, logp), atol=1e-16, rtol=1e-13
    )
    assert (got[:, -5:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_minus_advantage_times_weight(name: str) -> None:
    objective, batch, logp = filled(name, seed=5)
    objective = replace(objective, beta=0.0)
    batch = replace(batch, old_logp=None)
    expected = -(batch.advantage * batch.weight)
    torch.testing.assert_close(gradient(objective, batch, logp), expected, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_variance_has_gradient_exactly_zero(name: str) -> None:
    objective, batch, logp = filled(name, seed=6)
    objective = replace(objective, beta=0.0)
    flat = batch.rewards.clone()
    flat[batch.group == 1] = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    batch = with_advantage(objective, replace(batch, rewards=flat))
    grad = gradient(objective, batch, logp)
    assert (grad[batch.group == 1] == 0).all()
    assert (grad[batch.group == 0] != 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_is_only_asked_for_with_beta(name: str) -> None:
    objective, batch, logp = filled(name, seed=7)
    without = replace(objective, beta=0.0)
    assert not without.needs_reference
    assert policy_loss(without, replace(batch, ref_logp=None), logp).penalty is None
