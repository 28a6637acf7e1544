from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from covey.rng import (
    _TOKENS,
    Address,
    _hash,
    completion_uniforms,
    mini_batch_order,
    prompt_indices,
)

BASE: dict[str, Any] = {"seed": 7, "step": 3, "prompt": "arithmetic/train/2-4/5", "sample": 2}
seeds = st.integers(0, 2**64 - 1)
addresses = st.fixed_dictionaries(
    {
        "seed": seeds,
        "step": st.integers(0, 10**6),
        "prompt": st.text(max_size=30),
        "sample": st.integers(0, 10**4),
    }
)


def token_uniforms(*, count: int, **address: Any) -> np.ndarray:
    """The uniforms of one completion."""
    return completion_uniforms([Address(**address)], count)[0]


def test_the_generator_draws_these_numbers() -> None:
    uniforms = token_uniforms(**BASE, count=4)
    assert [int(u * 2**24) for u in uniforms] == [14142343, 974309, 4170958, 11222638]
    assert prompt_indices(seed=7, step=3, count=4, size=10) == [5, 0, 4, 3]
    assert mini_batch_order(seed=7, step=3, epoch=1, groups=8) == [0, 6, 5, 1, 3, 7, 4, 2]


def test_completions_drawn_together_have_the_numbers_of_each_alone() -> None:
    addresses = [Address(2**64 - 1 - n % 3, n % 2, f"p{n % 5}", n // 5, n % 4) for n in range(40)]
    together = completion_uniforms(addresses, 11)
    for row, address in zip(together, addresses, strict=True):
        seed, step, prompt, sample, turn = address
        generator = np.random.Philox(
            key=np.array([seed, step], dtype=np.uint64),
            counter=np.array([0, sample, _hash(prompt), _TOKENS + 2**32 * turn], dtype=np.uint64),
        )
        bits = generator.random_raw(11)
        assert row.tolist() == [int(b >> np.uint64(40)) / 2**24 for b in bits]
        assert row.tolist() == completion_uniforms([address], 11)[0].tolist()


def test_turn_0_is_the_default() -> None:
    assert (
        token_uniforms(**BASE, count=9).tolist() == token_uniforms(**BASE, turn=0, count=9).tolist()
    )


@given(addresses, st.integers(0, 50))
@settings(deadline=None)
def test_fewer_numbers_are_the_first_of_more(address: dict[str, Any], count: int) -> None:
    many = token_uniforms(**address, count=50)
    assert many.shape == (50,)
    assert token_uniforms(**address, count=count).tolist() == many[:count].tolist()


def test_numbers_do_not_depend_on_what_was_drawn_before() -> None:
    samples = list(range(40))
    expected = {n: token_uniforms(**{**BASE, "sample": n}, count=9).tolist() for n in samples}
    random.Random(0).shuffle(samples)
    for n in samples:
        assert token_uniforms(**{**BASE, "sample": n}, count=9).tolist() == expected[n]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"seed": 2**63},
        {"step": 4},
        {"sample": 3},
        {"turn": 1},
        {"turn": 2},
        {"prompt": "arithmetic/train/2-4/6"},
        {"prompt": "arithmetic/train/2-4/5 "},
        {"seed": 3, "step": 7},
    ],
    ids=str,
)
def test_another_address_draws_other_numbers(change: dict[str, Any]) -> None:
    ours = token_uniforms(**BASE, count=2000)
    theirs = token_uniforms(**{**BASE, **change}, count=2000)
    assert not set(ours[:4].tolist()) & set(theirs[:4].tolist())
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 4 / np.sqrt(2000)


def test_neighbouring_samples_share_no_stretch_of_numbers() -> None:
    streams = [token_uniforms(**{**BASE, "sample": n}, count=64).tolist() for n in range(64)]
    pairs = {pair for stream in streams for pair in pairwise(stream)}
    assert len(pairs) == 64 * 63


@given(addresses)
@settings(deadline=None)
def test_numbers_are_float32_on_a_grid_of_24_bits_below_1(address: dict[str, Any]) -> None:
    uniforms = token_uniforms(**address, count=64)
    assert uniforms.dtype == np.float32
    assert uniforms.min() >= 0.0
    assert uniforms.max() < 1.0
    steps = uniforms.astype(np.float64) * 2**24
    assert (steps == np.floor(steps)).all()


def test_numbers_are_uniform_along_a_rollout_and_across_addresses() -> None:
    along = token_uniforms(**BASE, count=100_000)
    samples = [token_uniforms(**{**BASE, "sample": n}, count=1)[0] for n in range(2000)]
    prompts = [token_uniforms(**{**BASE, "prompt": str(n)}, count=1)[0] for n in range(2000)]
    steps = [token_uniforms(**{**BASE, "step": n}, count=1)[0] for n in range(2000)]
    for uniforms in (along, samples, prompts, steps):
        assert stats.kstest(uniforms, "uniform").pvalue > 0.001
        counts, _ = np.histogram(uniforms, bins=20, range=(0, 1))
        assert stats.chisquare(counts).pvalue > 0.001


def test_neighbouring_positions_are_not_correlated() -> None:
    uniforms = token_uniforms(**BASE, count=100_000)
    for lag in (1, 2, 4):
        assert abs(np.corrcoef(uniforms[:-lag], uniforms[lag:])[0, 1]) < 4 / np.sqrt(100_000)


@given(seed=seeds, size=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_no_step_and_no_epoch_has_a_prompt_twice(seed: int, size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    per_epoch = size // count
    for epoch in range(3):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        asked = [
            index
            for step in steps
            for index in prompt_indices(seed=seed, step=step, count=count, size=size)
        ]
        assert len(asked) == len(set(asked)) == per_epoch * count
        assert set(asked) <= set(range(size))


def test_prompts_left_out_of_one_epoch_are_in_others() -> None:
    asked = [i for s in range(60) for i in prompt_indices(seed=3, step=s, count=4, size=10)]
    assert set(asked) == set(range(10))


@given(seed=seeds, batches=st.integers(1, 8), count=st.integers(1, 8))
@settings(deadline=None)
def test_the_steps_of_an_epoch_are_a_partition(seed: int, batches: int, count: int) -> None:
    size = batches * count
    steps = [
        prompt_indices(seed=seed, step=step, count=count, size=size) for step in range(batches)
    ]
    assert all(len(set(step)) == count for step in steps)
    assert sorted(index for step in steps for index in step) == list(range(size))


def test_prompts_do_not_depend_on_the_order_of_the_steps() -> None:
    def ask(step: int) -> list[int]:
        return prompt_indices(seed=5, step=step, count=7, size=20)

    steps = list(range(60))
    expected = {step: ask(step) for step in steps}
    random.Random(0).shuffle(steps)
    assert all(ask(step) == expected[step] for step in steps)


def test_epochs_and_seeds_are_in_different_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(prompt_indices(seed=seed, step=epoch, count=30, size=30))

    orders = {order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@given(seed=seeds, step=st.integers(0, 10**6), epoch=st.integers(0, 50), groups=st.integers(1, 64))
@settings(deadline=None)
def test_a_mini_batch_order_visits_every_group_once(
    seed: int, step: int, epoch: int, groups: int
) -> None:
    order = mini_batch_order(seed=seed, step=step, epoch=epoch, groups=groups)
    assert sorted(order) == list(range(groups))
    assert order == mini_batch_order(seed=seed, step=step, epoch=epoch, groups=groups)


def test_mini_batch_orders_differ_by_seed_step_and_epoch_and_from_the_prompt_order() -> None:
    orders = {
        tuple(mini_batch_order(seed=seed, step=step, epoch=epoch, groups=30))
        for seed in range(3)
        for step in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 27
    assert tuple(prompt_indices(seed=0, step=0, count=30, size=30)) not in orders
